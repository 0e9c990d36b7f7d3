"""Two drafters on the same text, paired by prompt, or one beside what a server's benchmark published."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.acceptance.intervals import (
    Interval,
    PairedDifference,
    Ratio,
    expected_acceptance,
    paired_difference,
    tokens_per_call,
)
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.errors import UserError
from foredraft.scoring import read_report
from foredraft.trace.adapters import PublishedAcceptance, read_published

_SEED = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """One drafter under one law: its counts by prompt, and what they were worth on the machine that scored it."""

    report: str
    drafter: str
    law: str
    target_fingerprint: str
    trace: str
    counts: AcceptanceReport
    predicted_speedup: Mapping[int, float]
    best_k: int


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of both drafters.

    Attributes:
        paired: second - first, resampling the prompts of both together.
    """

    metric: str
    first: float
    second: float
    paired: PairedDifference

    @property
    def difference(self) -> Interval:
        return self.paired.difference

    @property
    def relative(self) -> Interval:
        """The difference as a share of the first, the first taken as it is."""
        found, base = self.difference, self.first or math.nan
        return Interval(found.value / base, found.low / base, found.high / base)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two drafters under one law.

    Attributes:
        k: Draft length of mean_tokens_per_call and predicted_speedup in `changes`.
        changes: By metric.
        tokens_by_k: mean_tokens_per_call at every draft length that both were scored at.
    """

    first: Scored
    second: Scored
    k: int
    changes: Mapping[str, Change]
    tokens_by_k: Mapping[int, Change]


@dataclass(frozen=True, slots=True)
class Beside:
    """A replayed drafter beside what a server's benchmark published; not paired, since the text is another."""

    published: PublishedAcceptance
    scored: Scored
    k: int

    @property
    def mean_tokens_per_call(self) -> float:
        return self.scored.counts.mean_tokens_per_call(self.k)

    @property
    def accepted_of_drafted(self) -> float:
        return (self.mean_tokens_per_call - 1.0) / self.k


def compare_reports(
    first: Path, second: Path | None, drafters: Sequence[str] = (), k: int = 0
) -> list[Comparison] | list[Beside]:
    """Return how the second's drafters differ from the first's, under each law, on the same prompts.

    Args:
        first: A run folder, or its report.json; the baseline.
        second: Another, or a report of `vllm bench serve` or of SGLang's bench_serving; left out, the first again.
        drafters: One name that both have, or one of each; empty compares all names that both have.
        k: Draft length; 0 takes the best of the first.

    Raises:
        UserError: there is nothing that can be compared, or it was scored on other text; says which.
    """
    published = read_published(_report_file(second)) if second is not None else None
    here = _scored(first)
    if published is not None:
        chosen = [one for one in here if not drafters or one.drafter in drafters]
        return [Beside(published, one, _length(one, published.k or k)) for one in _some(chosen, first, here)]
    there = here if second is None else _scored(second)
    pairs = [(one, other) for one, other in _pairs(here, there, drafters) if one.law == other.law]
    if not pairs:
        laws = [", ".join(sorted({one.law for one in part})) for part in (here, there)]
        raise UserError(f"The reports have no law in common: {laws[0]}, and {laws[1]}.")
    return [_comparison(one, other, k) for one, other in pairs]


def comparison_json(found: Sequence[Comparison] | Sequence[Beside]) -> list[dict[str, Any]]:
    """Return plain values, with None for what is infinite or not known."""
    return [_beside_json(one) if isinstance(one, Beside) else _comparison_json(one) for one in found]


def _comparison(one: Scored, other: Scored, k: int) -> Comparison:
    _refuse_other_text(one, other)
    ks = [length for length in one.counts.ks if length in other.counts.ks]
    if not ks:
        raise UserError(f"{one.drafter} was scored at k = {one.counts.ks}, {other.drafter} at {other.counts.ks}.")
    chosen = k or (one.best_k if one.best_k in ks else ks[-1])
    if chosen not in ks:
        raise UserError(f"Both were scored at k = {', '.join(map(str, ks))}, not at {chosen}.")
    tokens = {length: _change("mean_tokens_per_call", one, other, tokens_per_call(length)) for length in ks}
    changes = {
        "expected_acceptance": _change("expected_acceptance", one, other, expected_acceptance),
        "mean_tokens_per_call": tokens[chosen],
    }
    if chosen in one.predicted_speedup and chosen in other.predicted_speedup:
        changes["predicted_speedup"] = _speedup_change(one, other, chosen)
    return Comparison(one, other, chosen, changes, tokens)


def _change(metric: str, one: Scored, other: Scored, ratio: Any) -> Change:
    paired = paired_difference(other.counts, one.counts, ratio, np.random.default_rng(_SEED))
    return Change(metric, ratio(one.counts).value, ratio(other.counts).value, paired)


def _speedup_change(one: Scored, other: Scored, k: int) -> Change:
    """Prompts vary, costs are as measured: the speedup of each moves with its own tokens per call."""
    ratio = tokens_per_call(k)

    def speedup(counts: AcceptanceReport) -> Ratio:
        scored = one if counts is one.counts else other
        tokens = ratio(counts)
        return Ratio(tokens.numerators * (scored.predicted_speedup[k] / tokens.value), tokens.denominators)

    return _change("predicted_speedup", one, other, speedup)


def _refuse_other_text(one: Scored, other: Scored) -> None:
    if one.target_fingerprint != other.target_fingerprint:
        raise UserError(
            f"{one.report} was scored on the target {one.target_fingerprint[:8]}, {other.report} on "
            f"{other.target_fingerprint[:8]}: differences would be those of the targets. Score both on one."
        )
    if one.trace != other.trace:
        raise UserError(
            f"{one.report} and {other.report} were scored on other text under {one.law} (traces {one.trace[:8]} and "
            f"{other.trace[:8]}). Score both with evaluate-acceptance --trace on one trace."
        )


def _pairs(here: Sequence[Scored], there: Sequence[Scored], drafters: Sequence[str]) -> Iterator[tuple[Scored, Scored]]:
    for first, second in _named_pairs(_names(here), _names(there), drafters, here is there):
        for one in here:
            yield from ((one, other) for other in there if (one.drafter, other.drafter) == (first, second))


def _named_pairs(
    here: Sequence[str], there: Sequence[str], drafters: Sequence[str], is_one_report: bool
) -> list[tuple[str, str]]:
    if len(drafters) > 2:
        raise UserError(f"--drafter is given at most twice, not {len(drafters)} times.")
    if drafters:
        for known, name, which in ((here, drafters[0], "first"), (there, drafters[-1], "second")):
            if name not in known:
                raise UserError(f"The {which} report has no drafter {name!r}; it has: {', '.join(known)}.")
    if is_one_report and len(drafters) < 2:
        raise UserError(f"Name two drafters of the report with --drafter; it has: {', '.join(here)}.")
    if drafters:
        return [(drafters[0], drafters[-1])]
    if len(here) == len(there) == 1:
        return [(here[0], there[0])]
    if not (common := [(name, name) for name in here if name in there]):
        raise UserError(
            f"No drafter has the same name in both: {', '.join(here)}, and {', '.join(there)}. Name one of each with "
            "--drafter A --drafter B."
        )
    return common


def _names(part: Sequence[Scored]) -> list[str]:
    return list(dict.fromkeys(one.drafter for one in part))


def _some(chosen: Sequence[Scored], path: Path, known: Sequence[Scored]) -> Sequence[Scored]:
    if not chosen:
        raise UserError(f"{path} has no such drafter; it has: {', '.join(_names(known))}.")
    return chosen


def _length(one: Scored, k: int) -> int:
    chosen = k or one.best_k
    if chosen not in one.counts.ks:
        raise UserError(f"{one.drafter} was scored at k = {', '.join(map(str, one.counts.ks))}, not at {chosen}.")
    return chosen


def _report_file(path: Path) -> Path:
    return path / "report.json" if path.is_dir() else path


def _scored(path: Path) -> list[Scored]:
    file = _report_file(path)
    report = read_report(file)
    return [
        Scored(
            report=str(path),
            drafter=entry["name"],
            law=law["label"],
            target_fingerprint=report["target"]["fingerprint"],
            trace=law.get("trace", ""),
            counts=_counts(file, entry),
            predicted_speedup={int(k): value for k, value in (entry.get("predicted_speedup") or {}).items()},
            best_k=int(entry.get("best_k") or 0),
        )
        for law in report["laws"]
        for entry in law["drafters"]
    ]


def _counts(report: Path, entry: Mapping[str, Any]) -> AcceptanceReport:
    name = entry.get("counts", "")
    if not name:
        raise UserError(f"{report} does not say where its counts by prompt lie: score again with this version.")
    try:
        return AcceptanceReport.from_json(json.loads((report.parent / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{report.parent / name} cannot be read ({error}): keep scores/ beside report.json.") from error


def _comparison_json(one: Comparison) -> dict[str, Any]:
    return {
        "law": one.first.law,
        "first": {"report": one.first.report, "drafter": one.first.drafter},
        "second": {"report": one.second.report, "drafter": one.second.drafter},
        "prompts": len(one.first.counts.prompts),
        "tokens": one.first.counts.tokens,
        "k": one.k,
        **{name: _change_json(change) for name, change in one.changes.items()},
        "mean_tokens_per_call_by_k": {str(k): _change_json(change) for k, change in one.tokens_by_k.items()},
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "first": change.first,
        "second": change.second,
        "difference": change.difference.value,
        "interval": change.difference.bounds,
        "relative": _finite(change.relative.value),
        "inside_noise": change.paired.is_inside_noise,
        "prompts_needed": _finite(change.paired.prompts_needed),
    }


def _beside_json(one: Beside) -> dict[str, Any]:
    published = {
        name: _finite(value) if isinstance(value, float) else value for name, value in asdict(one.published).items()
    }
    return {
        "law": one.scored.law,
        "drafter": one.scored.drafter,
        "k": one.k,
        "replayed": {
            "mean_tokens_per_call": one.mean_tokens_per_call,
            "accepted_of_drafted": one.accepted_of_drafted,
        },
        "published": published,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
