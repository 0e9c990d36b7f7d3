"""foredraft-plan.json: what a runtime is to be told of a draft, for programs that start it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.files import whole_folder, write_json

PLAN = "foredraft-plan.json"
SCHEMA = 1
UNMEASURED_LENGTH = 4
_GREEDY = "T=0"


@dataclass(frozen=True, slots=True)
class RuntimePlan:
    """How one runtime serves a draft.

    Attributes:
        runtime, version: A key of core.runtimes.RUNTIMES, and the version that the commands were written for.
        command: Starts it, with TARGET for the target.
        settings: The runtime's own settings, under its own names.
        stored_weights: What the runtime's own files hold, such as int8; empty where they hold the draft's weights.
    """

    runtime: str
    version: str
    k: int
    command: str
    settings: Mapping[str, Any]
    stored_weights: str = ""

    def write(
        self, folder: Path, target: str, measured: Mapping[str, Any], changes: tuple[str, ...], files: Mapping[str, str]
    ) -> None:
        """Write foredraft-plan.json.

        Args:
            measured: Of the draft's manifest: acceptance and cost by target law.
            changes: What was changed in the draft for this runtime.
            files: What lies where in the folder, by use.
        """
        write_json(
            folder / PLAN,
            {
                "schema": SCHEMA,
                "runtime": self.runtime,
                "version": self.version,
                "target": target,
                "num_draft_tokens": self.k,
                "num_draft_tokens_by_batch": length_by_batch(measured),
                "predicted_speedup": predicted_speedup(measured, self.k),
                "acceptance_by_position": _by_position(measured),
                "cost_ratio": _entry(measured).get("cost_ratio"),
                "settings": dict(self.settings),
                "stored_weights": self.stored_weights,
                "command": self.command,
                "files": dict(files),
                "changes": list(changes),
            },
        )

    def write_alone(self, out: Path, target: str) -> None:
        """Write a new folder that holds the plan alone, of a drafter that a runtime has itself.

        Raises:
            OutputError: the folder exists, or the disk is full.
        """
        with whole_folder(out) as folder:
            self.write(folder, target, {}, (), {})


def planned_length(measured: Mapping[str, Any]) -> int:
    """Return the draft length with the best predicted speedup under the greedy law, or the first law measured.

    4 where nothing was measured. Where no length pays, the shortest: 1.
    """
    best = _entry(measured).get("best_k")
    return UNMEASURED_LENGTH if best is None else max(1, int(best))


def predicted_speedup(measured: Mapping[str, Any], k: int) -> float | None:
    """Return plain time / time with this draft, as predicted for k tokens a block; None where it was not measured."""
    value = (_entry(measured).get("predicted_speedup") or {}).get(str(k))
    return value if value is not None and math.isfinite(value) else None


def length_by_batch(measured: Mapping[str, Any]) -> dict[str, int]:
    """Return the best draft length by batch size; 0 where none pays, empty where batches were not measured."""
    batches = _entry(measured).get("batch") or {}
    return {
        size: 0 if (batch["predicted_speedup"] or {}).get(str(batch["best_k"]), 0.0) <= 1.0 else int(batch["best_k"])
        for size, batch in batches.items()
        if batch.get("best_k") is not None
    }


def slowdown_sentence(measured: Mapping[str, Any], k: int) -> str:
    """Return the sentence that a plan below plain decoding's speed deserves; empty where none was predicted."""
    speedup = predicted_speedup(measured, k)
    if speedup is None or speedup > 1.0:
        return ""
    return f"With {k} draft tokens a block this draft is predicted to be slower than plain decoding: {speedup:.2f}x."


def _by_position(measured: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return, by law, P(token i accepted | all before it were) of the longest blocks measured."""
    return {
        label: entry["acceptance_by_position"][max(entry["acceptance_by_position"], key=int)]
        for label, entry in measured.items()
        if entry.get("acceptance_by_position")
    }


def _entry(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    return measured.get(_GREEDY) or next(iter(measured.values()), {})
