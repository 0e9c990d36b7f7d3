"""Cascades as candidates of a choice: a drafter that is itself sped up by a smaller one, from two reports."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from foredraft.core.errors import UserError

ARROW = " > "


def with_cascades(
    report: Mapping[str, Any], inner: Mapping[str, Mapping[str, Any]], batch_size: int = 1
) -> dict[str, Any]:
    """Return a report with a cascade for every drafter that has a report of its own as a target.

    A cascade ends at the target: its tokens are those of the model before it, its draft steps that model's, decoded
    speculatively (MATHS 6): S = mean_tokens_per_call / (1 + k rho / s + o), where s is what the model's own report
    predicts at draft lengths below k, and at most k. Reports of models further down make longer chains.

    Args:
        inner: Reports by the drafter of `report`, or of one of these reports, that is their target.
        batch_size: Requests decoded together.

    Raises:
        UserError: a drafter that no report scores, reports that need each other, or laws that differ.
    """
    known = {entry["name"] for one in (report, *inner.values()) for law in one["laws"] for entry in law["drafters"]}
    if unknown := [name for name in inner if name not in known]:
        raise UserError(
            f"--cascade {unknown[0]}: no report scores a drafter of that name. Known: {', '.join(sorted(known))}."
        )
    return _with_cascades(report, inner, str(batch_size), ())


def _with_cascades(
    report: Mapping[str, Any], inner: Mapping[str, Mapping[str, Any]], rows: str, above: tuple[str, ...]
) -> dict[str, Any]:
    laws = [dict(law) for law in report["laws"]]
    for name in _middles(report, inner):
        if name in above:
            raise UserError(f"--cascade {name}: {' and '.join(above)} are drafted for by each other.")
        below = _with_cascades(inner[name], inner, rows, (*above, name))
        for law in laws:
            entry = next(one for one in law["drafters"] if one["name"] == name)
            law["drafters"] = [*law["drafters"], *_cascades(entry, law, _same_law(below, law, name), rows)]
    return {**report, "laws": laws}


def _middles(report: Mapping[str, Any], inner: Mapping[str, Any]) -> list[str]:
    return [entry["name"] for entry in report["laws"][0]["drafters"] if entry["name"] in inner]


def _same_law(report: Mapping[str, Any], law: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    keys = ("temperature", "top_k", "top_p")
    for one in report["laws"]:
        if all(one[key] == law[key] for key in keys):
            return one
    raise UserError(
        f"--cascade {name}: its report was not scored under {law['label']}: collect and score it there too."
    )


def _cascades(
    middle: Mapping[str, Any], law: Mapping[str, Any], below: Mapping[str, Any], rows: str
) -> list[dict[str, Any]]:
    """Return the entry of a middle model once for each drafter that its own report times at this batch size."""
    found = []
    for small in below["drafters"]:
        faster = _predicted(small, rows)
        if not (faster and _predicted(middle, rows) and _drafting(middle, rows)):
            continue
        speedup = {k: _times_faster(faster, int(k)) for k in middle["mean_tokens_per_call"]}
        predicted = _sped_up(middle, law, speedup, rows)
        longest = max(map(int, speedup))
        found.append({
            **middle, "name": f"{small['name']}{ARROW}{middle['name']}", "kind": "cascade", "twin": "",
            "bytes": middle["bytes"] + small["bytes"], "cost_ratio": middle["cost_ratio"] / speedup[str(longest)],
            "predicted_speedup": predicted,
            "best_k": int(max(predicted, key=lambda k: predicted[k])),
            "batch": {rows: {"predicted_speedup": predicted}},
            "measured_speedup": None, "audit": None,
        })  # fmt: skip
    return found


def _predicted(entry: Mapping[str, Any], rows: str) -> Mapping[str, float]:
    return (entry.get("batch") or {}).get(rows, {}).get("predicted_speedup") or {}


def _drafting(entry: Mapping[str, Any], rows: str) -> Mapping[str, float]:
    """Return the seconds of drafting by length; older reports keep them for one request alone."""
    single = entry["draft_seconds"] if rows == "1" else {}
    return entry["batch"][rows].get("draft_seconds") or single


def _times_faster(predicted: Mapping[str, float], k: int) -> float:
    """Return how many times faster k tokens are drafted: the small drafter's blocks end within them."""
    return min(max((value for length, value in predicted.items() if int(length) < k), default=1.0), float(k))


def _sped_up(
    middle: Mapping[str, Any], law: Mapping[str, Any], speedup: Mapping[str, float], rows: str
) -> dict[str, float]:
    """Return the predicted speedup with draft steps that many times as fast, all else being as it was."""
    timed, found = law["batch"][rows]["target_seconds"], {}
    drafting = _drafting(middle, rows)
    lengths = sorted(map(int, drafting))
    for k, overall in _predicted(middle, rows).items():
        tokens = middle["mean_tokens_per_call"][k]
        seconds = float(np.interp(int(k), lengths, [drafting[str(length)] for length in lengths]))
        plain = timed["1"] + (law["batch"][rows].get("plain_overhead_seconds") or 0.0)
        block = tokens * plain / overall - seconds * (1.0 - 1.0 / speedup[k])
        found[k] = tokens * plain / block
    return found
