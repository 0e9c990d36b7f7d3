"""report.json, read into typed figures for the pages that show it. Optional parts may be absent."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.acceptance.wording import Figure, quantity, size
from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw

SCHEMA = 1
NO_FIGURE = Figure()


@dataclass(frozen=True, slots=True)
class Score:
    """Acceptance on one body of text; figures by draft length k where they depend on it."""

    expected_acceptance: Figure
    acceptance_by_position: Mapping[int, tuple[Figure, ...]]
    mean_tokens_per_call: Mapping[int, Figure]
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Literal:
    """What literal speculative decoding of a few prompts said; 0 prompts: not done.

    Attributes:
        replayed: Tokens per call by replay of the same text.
        same_text: Prompts with the text of plain decoding; -1 where that was not counted.
    """

    prompts: int
    mean_tokens_per_call: Mapping[int, float]
    replayed: Mapping[int, float]
    same_text: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Predicted for one drafter at one batch size; best_k is 0 where plain decoding is the fastest.

    Attributes:
        machine: Name of a hardware profile; empty for the machine that costs were measured on.
        speedup: At the best k.
        break_even: Acceptance from which on the fastest draft length pays.
        joules: Per token; NaN where the power is not known.
        fits: Whether the pair fits into the machine's memory.
    """

    machine: str
    rows: int
    best_k: int
    speedup: float
    break_even: float
    tokens_per_second: float
    joules: float = math.nan
    fits: bool = True


@dataclass(frozen=True, slots=True)
class CriteriaFigures:
    """What explains a draft's acceptance and does not rank it; NaN where there is no figure."""

    acceptance_low: float
    acceptance_high: float
    kl_low: float
    kl_high: float
    kl_infinite_share: float
    top10_coverage: float
    frequent_token_accuracy: float
    entropy_ratio: float
    memory_fraction: float
    cost_ratio: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One drafter under one law. best_k is 0 where no cost was measured.

    Attributes:
        draft_law: The law it draws from, where that is not the target's; else empty.
        batches: Here by batch size, then on other machines.
        criteria: None for drafters without laws.
    """

    name: str
    kind: str
    score: Score
    domains: Mapping[str, Score]
    cost_ratio: float
    predicted_speedup: Mapping[int, float]
    best_k: int
    measured_speedup: Figure
    measured_k: int
    audit: Literal
    parameters: float
    num_bytes: float
    draft_law: str = ""
    batches: tuple[BatchFigures, ...] = ()
    criteria: CriteriaFigures | None = None

    @property
    def shown_k(self) -> int:
        """The best draft length, or the longest where no cost was measured; 0 without any figure."""
        return self.best_k or max(self.score.mean_tokens_per_call, default=0)

    @property
    def tokens_at_best(self) -> Figure:
        return self.tokens_at(self.best_k)

    @property
    def predicted_at_best(self) -> Figure:
        return self.predicted_at(self.best_k)

    def tokens_at(self, k: int) -> Figure:
        return self.score.mean_tokens_per_call.get(k, NO_FIGURE)

    def predicted_at(self, k: int) -> Figure:
        """Return the predicted speedup; its interval is that of the tokens per call, with the costs as measured."""
        speedup, tokens = self.predicted_speedup.get(k, math.nan), self.tokens_at(k)
        if not tokens.has_interval:
            return Figure(speedup)
        return Figure(speedup, speedup * tokens.low / tokens.value, speedup * tokens.high / tokens.value)


@dataclass(frozen=True, slots=True)
class LawStandings:
    """The drafters under one sampling law, best predicted speedup first."""

    label: str
    is_greedy: bool
    drafters: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was selected; an empty drafter says that nothing was."""

    drafter: str = ""
    k: int = 0
    predicted_speedup: Figure = NO_FIGURE
    sentence: str = ""
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CurvePoint:
    positions: float
    seconds: float
    loss: float
    acceptance: float
    mean_tokens_per_call: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """`better` minus `worse` on the same prompts; NaN prompts needed where that was not counted, or none suffice."""

    law: str
    better: str
    worse: str
    metric: str
    difference: Figure
    prompts_needed: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A whole report."""

    target: str
    target_facts: str
    laws: tuple[LawStandings, ...]
    choice: Choice
    curves: Mapping[str, tuple[CurvePoint, ...]]
    machine: str
    stages: tuple[tuple[str, float], ...]
    paired: tuple[PairedDifference, ...]
    notes: tuple[str, ...]

    @property
    def ranking(self) -> tuple[str, ...]:
        """Every drafter once: the chosen one, then by its best predicted speedup under any law."""
        best: dict[str, float] = {}
        for law in self.laws:
            for drafter in law.drafters:
                best[drafter.name] = max(best.get(drafter.name, -math.inf), _rank(drafter))
        return tuple(sorted(best, key=lambda name: (name != self.choice.drafter, -best[name])))


def read_report(report: Mapping[str, Any]) -> Reading:
    """Return a report by the contract of report.json, schema 1.

    Raises:
        UserError: the report has another schema.
    """
    if report.get("schema") != SCHEMA:
        raise UserError(
            f"The report has schema {report.get('schema')!r}, this foredraft reads schema {SCHEMA}. "
            "Score the drafters again with this version, or read the report with the version that wrote it."
        )
    return Reading(
        target=_target_name(report.get("target")),
        target_facts=_target_facts(report.get("target")),
        laws=tuple(_law_standings(law) for law in report.get("laws") or ()),
        choice=_choice(report.get("selection") or {}),
        curves={
            _text(name): tuple(map(_curve_point, curve))
            for name, curve in (report.get("curves") or {}).items()
            if curve
        },
        machine=_described(report.get("machine")),
        stages=tuple((_text(stage["name"]), _float(stage.get("seconds"))) for stage in report.get("stages") or ()),
        paired=tuple(map(_paired, report.get("paired") or ())),
        notes=tuple(map(_text, report.get("notes") or ())),
    )


def _law_standings(law: Mapping[str, Any]) -> LawStandings:
    label = _law_label(law)
    drafters = sorted((_standing(entry, label) for entry in law.get("drafters") or ()), key=_rank, reverse=True)
    return LawStandings(label, law.get("temperature") == 0, tuple(drafters))


def _standing(entry: Mapping[str, Any], law: str) -> Standing:
    predicted = {int(k): _float(value) for k, value in (entry.get("predicted_speedup") or {}).items()}
    best = max((k for k, value in predicted.items() if math.isfinite(value)), key=lambda k: predicted[k], default=0)
    measured = entry.get("measured_speedup") or {}
    return Standing(
        name=_text(entry["name"]),
        kind=_text(entry.get("kind")),
        score=_score(entry),
        domains={_text(name): _score(score) for name, score in (entry.get("domains") or {}).items()},
        cost_ratio=_float(entry.get("cost_ratio")),
        predicted_speedup=predicted,
        best_k=int(entry.get("best_k") or best),
        measured_speedup=_figure(measured.get("value"), measured.get("interval")),
        measured_k=int(measured.get("k") or 0),
        audit=_literal(entry.get("audit") or {}),
        parameters=_float(entry.get("parameters")),
        num_bytes=_float(entry.get("bytes")),
        draft_law=_draft_law(entry, law),
        batches=tuple(_batches(entry)),
        criteria=_criteria(entry["criteria"]) if entry.get("criteria") else None,
    )


def _draft_law(entry: Mapping[str, Any], law: str) -> str:
    """Return the law of a draft that has laws, where it is not the target's; guesses without one count as greedy."""
    own = _law_label(entry.get("draft_law")) if entry.get("draft_law") and entry.get("criteria") else law
    return own if own != law else ""


def _batches(entry: Mapping[str, Any]) -> Iterator[BatchFigures]:
    places = [("", entry.get("batch") or {}), *(entry.get("hardware") or {}).items()]
    for machine, batches in places:
        for rows, figures in batches.items():
            predicted, even = figures["predicted_speedup"], figures["break_even_acceptance"]
            best = max(predicted, key=lambda k: predicted[k])
            yield BatchFigures(
                _text(machine),
                int(rows),
                int(figures["best_k"]),
                _float(predicted[best]),
                _float(even.get(best)),
                _float(figures.get("tokens_per_second")),
                _float(figures.get("joules_per_token")),
                bool(figures.get("fits", True)),
            )


def _criteria(entry: Mapping[str, Any]) -> CriteriaFigures:
    bounds = [*(entry.get("expected_acceptance_bounds") or (None, None)), *(entry.get("kl_divergence") or (None, None))]
    names = ("kl_infinite_share", "top10_coverage", "frequent_token_accuracy", "entropy_ratio", "memory_fraction")
    return CriteriaFigures(*map(_float, bounds), *(_float(entry.get(name)) for name in (*names, "cost_ratio")))


def _score(entry: Mapping[str, Any]) -> Score:
    intervals = entry.get("interval") or {}
    tokens, positions = intervals.get("mean_tokens_per_call") or {}, intervals.get("acceptance_by_position") or {}
    return Score(
        expected_acceptance=_figure(entry.get("expected_acceptance"), intervals.get("expected_acceptance")),
        acceptance_by_position={
            int(k): tuple(
                _figure(value, bounds)
                for value, bounds in zip(values, positions.get(k) or [None] * len(values), strict=True)
            )
            for k, values in (entry.get("acceptance_by_position") or {}).items()
        },
        mean_tokens_per_call={
            int(k): _figure(value, tokens.get(k)) for k, value in (entry.get("mean_tokens_per_call") or {}).items()
        },
        prompts=int(entry.get("prompts") or 0),
        tokens=int(entry.get("tokens") or 0),
    )


def _literal(audit: Mapping[str, Any]) -> Literal:
    literal, replayed = (
        {int(k): _float(value) for k, value in (audit.get(name) or {}).items()}
        for name in ("mean_tokens_per_call", "replayed_mean_tokens_per_call")
    )
    return Literal(
        int(audit.get("prompts") or 0), literal, replayed, int(audit.get("same_text", -1)), bool(audit.get("agrees"))
    )


def _choice(selection: Mapping[str, Any]) -> Choice:
    return Choice(
        drafter=_text(selection.get("drafter")),
        k=int(selection.get("k") or 0),
        predicted_speedup=_figure(selection.get("predicted_speedup"), selection.get("interval")),
        sentence=_text(selection.get("sentence")),
        reasons=tuple((_text(name), _text(reason)) for name, reason in (selection.get("reasons") or {}).items()),
    )


def _curve_point(point: Mapping[str, Any]) -> CurvePoint:
    names = ("positions", "seconds", "loss", "acceptance", "mean_tokens_per_call")
    return CurvePoint(*(_float(point.get(name)) for name in names))


def _paired(entry: Mapping[str, Any]) -> PairedDifference:
    return PairedDifference(
        law=_law_label(entry.get("law")),
        better=_text(entry.get("better")),
        worse=_text(entry.get("worse")),
        metric=_text(entry.get("metric")),
        difference=_figure(entry.get("difference"), entry.get("interval")),
        prompts_needed=_float(entry.get("prompts_needed")),
    )


def _law_label(law: object) -> str:
    if isinstance(law, Mapping):
        return str(SamplingLaw(_float(law["temperature"]), int(law.get("top_k") or 0), float(law.get("top_p") or 1.0)))
    return str(SamplingLaw(float(law))) if isinstance(law, (int, float)) else _text(law)


def _target_name(target: object) -> str:
    return _text(target.get("name")) if isinstance(target, Mapping) else _text(target)


def _target_facts(target: object) -> str:
    if not isinstance(target, Mapping):
        return ""
    facts = (
        _text(target.get("dtype")),
        f"{quantity(_float(target['parameters']))} parameters" if "parameters" in target else "",
        size(_float(target["bytes"])) if "bytes" in target else "",
    )
    return ", ".join(filter(None, facts))


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return _text(", ".join(f"{name.replace('_', ' ')} {part}" for name, part in value.items()))
    return _text(value)


def _text(value: object) -> str:
    """Names come from file names and servers: control characters in them reach neither page nor terminal."""
    words = " ".join(str(value or "").split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)


def _figure(value: object, bounds: Sequence[object] | None) -> Figure:
    low, high = bounds or (None, None)
    return Figure(_float(value), _float(low), _float(high))


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _rank(drafter: Standing) -> float:
    """Order by predicted speedup; where no cost was measured, behind all those and by tokens per call."""
    speedup, tokens = drafter.predicted_at_best.value, drafter.tokens_at(drafter.shown_k).value
    return speedup if math.isfinite(speedup) else -1.0 / max(tokens, 0.5) if math.isfinite(tokens) else -2.0
