"""Simulating policies over recorded traffic, from traces and drafters to figures; no target is loaded."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.core.errors import UserError
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT, Progress
from foredraft.drafters import load_drafter
from foredraft.select.arms import Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import read_policy
from foredraft.select.saved import Saved, require_free, save_selection
from foredraft.select.simulate import Run, Traffic, fixed_runs, position_oracle, record, request_oracle, simulate
from foredraft.selection_costs import costs_by_requests
from foredraft.settings import SimulateSettings
from foredraft.trace.store import Trace, absent_target

_STRETCHES = 12  # parts of the stream that the choice over time is shown in


def simulate_policies(
    traces: Sequence[Trace],
    specs: Sequence[str],
    policies: Sequence[str],
    settings: SimulateSettings,
    report: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
    out: Path | None = None,
) -> dict[str, Any]:
    """Return what every policy makes of the traces' answers, in their order, beside fixed arms and oracles.

    Drafters without a model are replayed without any; those with one run it once over the text. The target is not
    needed: what it costs is taken from `report`, or from the settings.

    Args:
        specs: Of the drafters, `name=spec` or a spec alone.
        report: Where the times of target and draft steps were measured; names are those of its drafters.
        out: File that the fastest policy is written to, as a drafter that `generate` takes; none if left out.

    Raises:
        UserError: no drafter, a policy that is not known, or a report without times or of another target.
        TraceError: the traces are of several targets or laws, or hold no answers.
        OutputError: `out` is there already.
    """
    if out is not None:
        require_free(out)
    speaker, law = absent_target(traces), traces[0].info.law
    for trace in traces[1:]:
        if trace.info.law != law:
            raise UserError(
                f"{traces[0].path} is of {law}, {trace.path} of {trace.info.law}: simulate one law at a time."
            )
    if report and report["target"].get("fingerprint") != speaker.fingerprint:
        raise UserError(
            f"The report is of {report['target']['name']}, the trace was written by {speaker.name}: times of another "
            "target say nothing here. Name a report of this one, or none."
        )
    chosen = {policy: read_policy(policy) for policy in policies}
    pairs = [named_spec(spec) for spec in specs]
    if twice := [name for name, _ in pairs if [one for one, _ in pairs].count(name) > 1]:
        raise UserError(f"--drafter {twice[0]} stands twice: write name=spec with a name for each.")
    named = dict(pairs)
    drafters = {name: bound_for(load_drafter(spec, speaker), law) for name, spec in named.items()}
    arms = Arms.of(list(drafters), settings.lengths)
    answered = (row for trace in traces for row in trace.rows(tops=False) if len(row.answer_ids))
    rows = list(islice(answered, settings.limit or None))
    traffic = record(drafters, rows, arms.longest, seed=settings.seed, progress=progress)
    by_requests = costs_by_requests(drafters, rows[0].answer(), arms.longest, settings, report, law.temperature)
    costs, target_bytes = by_requests[settings.batch_size], _target_bytes(report, settings)
    references = References.of(traffic, costs, settings.lengths)
    found = []
    with progress.task("simulating", float(len(chosen)), "policies") as task:
        for name, policy in chosen.items():
            began = time.perf_counter()
            run = simulate(
                traffic, policy, costs, settings.lengths, settings.seed, settings.deciding_seconds,
                target_bytes=target_bytes,
            )  # fmt: skip
            found.append(references.described(name, run, arms) | {"wall_seconds": time.perf_counter() - began})
            task.advance()
    if out is not None:
        fastest = max(found, key=lambda one: one["tokens_per_second"])["policy"]
        save_selection(out, Saved.of(speaker, named, settings.lengths, fastest, by_requests, target_bytes))
    return {
        "target": speaker.name,
        "law": str(law),
        "answers": len(traffic.answers),
        "tokens": traffic.tokens,
        "drafters": list(named),
        "lengths": list(settings.lengths),
        "costs": {
            "measured": report is not None,
            "batch_size": settings.batch_size,
            "target_seconds": costs.target.tolist(),
            "draft_seconds": dict(zip(drafters, costs.drafts.tolist(), strict=True)),
        },
        **references.to_json(arms),
        "policies": found,
    }


def _target_bytes(report: Mapping[str, Any] | None, settings: SimulateSettings) -> int:
    return settings.target_bytes or int(report["target"].get("bytes", 0) if report else 0)


@dataclass(frozen=True, slots=True)
class References:
    """What policies are compared with."""

    traffic: Traffic
    fixed: Sequence[Run]
    by_request: Run
    by_position: Run

    @staticmethod
    def of(traffic: Traffic, costs: BlockCosts, lengths: Sequence[int]) -> "References":
        fixed = fixed_runs(traffic, costs, lengths)
        return References(traffic, fixed, request_oracle(fixed), position_oracle(traffic, costs, lengths))

    @property
    def best(self) -> int:
        """The arm that alone is the fastest over all traffic."""
        return min(range(len(self.fixed)), key=lambda arm: float(self.fixed[arm].seconds.sum()))

    def to_json(self, arms: Arms) -> dict[str, Any]:
        return {
            "best_fixed": {
                "arm": arms.label(self.best),
                **self._figures(self.fixed[self.best]),
                "domains": self._over_plain(self.fixed[self.best]),
            },
            "plain": self._figures(self.fixed[0]),
            "request_oracle": {**self._figures(self.by_request), "domains": self._over_plain(self.by_request)},
            "position_oracle": self._figures(self.by_position),
            "fixed": [{"arm": arms.label(arm), **self._figures(run)} for arm, run in enumerate(self.fixed)],
        }

    def described(self, name: str, run: Run, arms: Arms) -> dict[str, Any]:
        """Return the figures of a policy: rates, regret in seconds, and what it chose, by domain and over time."""
        best, plain = self.fixed[self.best], self.fixed[0]
        return {
            "policy": name,
            **self._figures(run),
            "over_best_fixed": best.seconds.sum() / run.seconds.sum(),
            "of_request_oracle": self.by_request.seconds.sum() / run.seconds.sum(),
            "of_position_oracle": self.by_position.seconds.sum() / run.seconds.sum(),
            "regret_seconds": float(run.seconds.sum() - best.seconds.sum()),
            "oracle_regret_seconds": float(run.seconds.sum() - self.by_request.seconds.sum()),
            "shifts": run.shifts,
            "domains": {
                domain: {
                    "over_plain": plain.seconds[own].sum() / run.seconds[own].sum(),
                    "over_best_fixed": best.seconds[own].sum() / run.seconds[own].sum(),
                    "tokens_per_second": float(run.tokens[own].sum() / run.seconds[own].sum()),
                    "chosen": _shares([run.arms[index] for index in own], arms),
                }
                for domain, own in self._domains().items()
            },
            "over_time": [
                {
                    "answers": int(part[-1]) + 1,
                    "regret_seconds": float((run.seconds - best.seconds)[: part[-1] + 1].sum()),
                    "chosen": _shares([run.arms[index] for index in part], arms),
                }
                for part in np.array_split(np.arange(len(run.seconds)), min(_STRETCHES, len(run.seconds)))
            ],
        }

    def _figures(self, run: Run) -> dict[str, Any]:
        return {
            "tokens_per_second": run.tokens_per_second,
            "mean_tokens_per_call": run.mean_tokens_per_call,
            "over_plain": float(self.fixed[0].seconds.sum() / run.seconds.sum()),
        }

    def _over_plain(self, run: Run) -> dict[str, float]:
        """Return the speed / that of plain decoding by domain."""
        plain = self.fixed[0].seconds
        return {domain: float(plain[own].sum() / run.seconds[own].sum()) for domain, own in self._domains().items()}

    def _domains(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, answer in enumerate(self.traffic.answers):
            found.setdefault(answer.domain, []).append(index)
        return found


def _shares(arms_of_blocks: Sequence[np.ndarray], arms: Arms) -> dict[str, float]:
    counts = Counter(arm for blocks in arms_of_blocks for arm in blocks.tolist())
    return {arms.label(arm): count / counts.total() for arm, count in sorted(counts.items())}


def named_spec(spec: str) -> tuple[str, str]:
    """Read `name=spec`; a spec alone is its own name."""
    name, separator, rest = spec.partition("=")
    return (name, rest) if separator and name.replace("-", "").replace("_", "").isalnum() else (spec, spec)
