"""Simulating policies over recorded traffic, from traces and drafters to figures; no target is loaded."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.core.errors import UserError
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Answer, Drafter, Observer
from foredraft.drafters import load_drafter
from foredraft.select.arms import Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import read_policy
from foredraft.select.saved import Saved, require_free, save_selection
from foredraft.select.simulate import Run, Traffic, fixed_runs, position_oracle, record, request_oracle, simulate
from foredraft.settings import SimulateSettings
from foredraft.trace.store import Trace, absent_target

_TIMED = 24
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
    costs = costs_for(drafters, rows[0].answer(), arms.longest, settings, report, law.temperature)
    references = References.of(traffic, costs, settings.lengths)
    found = []
    with progress.task("simulating", float(len(chosen)), "policies") as task:
        for name, policy in chosen.items():
            began = time.perf_counter()
            run = simulate(traffic, policy, costs, settings.lengths, settings.seed, settings.deciding_seconds)
            found.append(references.described(name, run, arms) | {"wall_seconds": time.perf_counter() - began})
            task.advance()
    if out is not None:
        fastest = max(found, key=lambda one: one["tokens_per_second"])["policy"]
        save_selection(out, Saved.of(speaker, named, settings.lengths, fastest, costs))
    return {
        "target": speaker.name,
        "law": str(law),
        "answers": len(traffic.answers),
        "tokens": traffic.tokens,
        "drafters": list(named),
        "lengths": list(settings.lengths),
        "costs": {
            "measured": report is not None,
            "target_seconds": costs.target.tolist(),
            "draft_seconds": dict(zip(drafters, costs.drafts.tolist(), strict=True)),
        },
        **references.to_json(arms),
        "policies": found,
    }


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
            "best_fixed": {"arm": arms.label(self.best), **self._figures(self.fixed[self.best])},
            "plain": self._figures(self.fixed[0]),
            "request_oracle": self._figures(self.by_request),
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

    def _domains(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, answer in enumerate(self.traffic.answers):
            found.setdefault(answer.domain, []).append(index)
        return found


def simulation_table(found: Mapping[str, Any]) -> str:
    """Return a simulation as text: references, policies, and for each policy its choice by domain and over time."""
    lines = [
        f"{found['tokens']} tokens of {found['answers']} answers by {found['target']}, {found['law']}; "
        + ("measured costs." if found["costs"]["measured"] else "costs as given, none was measured for the target."),
        "",
        _row("", "tok/s", "tok/call", "x plain", "x best fixed", "of oracle", "regret s"),
    ]
    best = found["best_fixed"]["tokens_per_second"]
    oracle = found["request_oracle"]["tokens_per_second"]
    for name in ("plain", "best_fixed", "request_oracle", "position_oracle"):
        one = found[name]
        label = one.get("arm", name.replace("_", " "))
        lines.append(_figures(f"{label} (fixed)" if name == "best_fixed" else label, one, best, oracle, ""))
    for one in found["policies"]:
        lines.append(_figures(one["policy"], one, best, oracle, f"{one['regret_seconds']:+.2f}"))
    for one in found["policies"]:
        lines += ["", f"{one['policy']}, by domain:"]
        for domain, part in one["domains"].items():
            lines.append(f"  {domain:18.18} {part['over_plain']:5.2f}x plain  {_words(part['chosen'])}")
        lines += ["  over time:"]
        for part in one["over_time"]:
            lines.append(f"  {part['answers']:6} answers {part['regret_seconds']:+9.2f} s  {_words(part['chosen'])}")
    return "\n".join(lines)


def _figures(label: str, one: Mapping[str, Any], best: float, oracle: float, regret: str) -> str:
    rate = one["tokens_per_second"]
    return _row(
        label, f"{rate:.2f}", f"{one['mean_tokens_per_call']:.2f}", f"{one['over_plain']:.2f}", f"{rate / best:.3f}",
        f"{rate / oracle:.3f}", regret,
    )  # fmt: skip


def _row(label: str, *cells: str) -> str:
    return f"{label:34.34}" + "".join(f"{cell:>13}" for cell in cells)


def _words(chosen: Mapping[str, float]) -> str:
    ranked = sorted(chosen.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{label} {share:.0%}" for label, share in ranked)


def _shares(arms_of_blocks: Sequence[np.ndarray], arms: Arms) -> dict[str, float]:
    counts = Counter(arm for blocks in arms_of_blocks for arm in blocks.tolist())
    return {arms.label(arm): count / counts.total() for arm, count in sorted(counts.items())}


def named_spec(spec: str) -> tuple[str, str]:
    """Read `name=spec`; a spec alone is its own name."""
    name, separator, rest = spec.partition("=")
    return (name, rest) if separator and name.replace("-", "").replace("_", "").isalnum() else (spec, spec)


def costs_for(
    drafters: Mapping[str, Drafter],
    answer: Answer,
    longest: int,
    settings: SimulateSettings,
    report: Mapping[str, Any] | None,
    temperature: float = 0.0,
) -> BlockCosts:
    """Return the report's times; of drafters that it does not hold, those with a model are priced by ratio."""
    law: Mapping[str, Any] = {"target_seconds": {}, "drafters": [], "overhead_seconds": 0.0}
    if report:
        same = [one for one in report["laws"] if one["temperature"] == temperature]
        law = (same or report["laws"])[0]
    if report and not law["target_seconds"]:
        raise UserError("The report has no cost: score the drafters with --target, so that steps are timed.")
    steps = law["target_seconds"] or {
        str(n): settings.target_seconds * (1 + settings.target_growth * (n - 1)) for n in range(1, longest + 2)
    }
    entries = {entry["name"]: entry["draft_seconds"] for entry in law["drafters"]}
    for name, drafter in drafters.items():
        if name not in entries:
            per_token = settings.cost_ratio * steps["1"]
            timed = {"1": per_token, str(longest): longest * per_token}
            entries[name] = timed if drafter.num_parameters else _timed(drafter, answer, longest)
    priced = {
        "target_seconds": steps,
        "overhead_seconds": law["overhead_seconds"],
        "plain_overhead_seconds": law.get("plain_overhead_seconds"),
        "drafters": [{"name": name, "draft_seconds": seconds} for name, seconds in entries.items()],
    }
    return BlockCosts.of_report(priced, list(drafters), longest)


def _timed(drafter: Drafter, answer: Answer, longest: int) -> dict[str, float]:
    """Return the median seconds of a whole proposal, for one token and for the longest block."""
    own = drafter.bind(drafter.law) if not isinstance(drafter, Observer) else drafter
    generator, found = torch.Generator(), {}
    for k in (1, longest):
        seconds = []
        for end in range(answer.start, min(answer.start + _TIMED, len(answer.token_ids))):
            began = time.perf_counter()
            own.propose(answer.token_ids[:end], k, generator)
            seconds.append(time.perf_counter() - began)
        found[str(k)] = float(np.median(seconds))
    return found
