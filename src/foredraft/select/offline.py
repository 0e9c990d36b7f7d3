"""Choosing one drafter and its draft length for a deployment, or none, from measured figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foredraft.acceptance.wording import Figure, interval, percent, size, times
from foredraft.core.errors import UserError
from foredraft.settings import SelectSettings

NO_SPECULATION = "no speculation"

_PLAIN = Figure(1.0, 1.0, 1.0)
_KINDS_OF_TRANSFORMERS = ("causal-lm", "prompt-lookup")


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """What was measured of one candidate under one law, and what decides where it can be served.

    Attributes:
        name: Unique among the candidates.
        kind: As in the catalog.
        num_bytes: Memory that it holds while serving.
        mean_tokens_per_call: By draft length, with the interval by prompt.
        predicted_speedup: By draft length; empty where no cost was measured.
        head_rows: Rows of a trimmed head; 0 for a full head or none.
        full_head_twin: Name of the candidate that differs only in computing the whole head; empty if there is none.
        has_int8_body: Whether its speed rests on products with 8-bit weights.
        plain_seconds: Time of a token of plain decoding, which is as measured with it; 0 where it is not known.
    """

    name: str
    kind: str
    num_bytes: int
    mean_tokens_per_call: Mapping[int, Figure]
    predicted_speedup: Mapping[int, float]
    head_rows: int = 0
    full_head_twin: str = ""
    has_int8_body: bool = False
    plain_seconds: float = 0.0

    @property
    def best_k(self) -> int:
        """The draft length of the largest predicted speedup; the shortest of several."""
        return max(sorted(self.predicted_speedup), key=lambda k: self.predicted_speedup[k])

    @property
    def best(self) -> Figure:
        """The largest predicted speedup; its interval is that of the tokens per call, with the costs as measured."""
        speedup = self.predicted_speedup[self.best_k]
        tokens = self.mean_tokens_per_call.get(self.best_k, Figure())
        return tokens.scaled(speedup / tokens.value) if tokens.has_interval else Figure(speedup)

    def joules(self, watts: float) -> float:
        """Return the energy of a token at the best length, on a machine of that power."""
        return watts * self.plain_seconds / self.best.value


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice, and why.

    Attributes:
        drafter: Name of the candidate, or NO_SPECULATION.
        k: Its draft length; 0 for NO_SPECULATION.
        predicted_speedup: With the interval by prompt.
        sentence: The choice in plain words; where no candidate fits, how far the nearest is from fitting.
        reasons: For each other candidate one sentence that says why it lost.
        refused: Those that the settings rule out.
    """

    drafter: str
    k: int
    predicted_speedup: Figure
    sentence: str
    reasons: Mapping[str, str]
    refused: tuple[str, ...] = ()


def choose(candidates: Sequence[CandidateFigures], settings: SelectSettings, target_bytes: int) -> Selection:
    """Return the candidate with the largest predicted speedup among those that the settings allow.

    Of equally fast ones the smallest wins. Plain decoding wins where nothing is faster.

    Args:
        candidates: Figures of one law, or of several by over_laws.
        settings: Memory limit and runtime.
        target_bytes: Memory of the target's weights.

    Raises:
        UserError: there is no candidate, two have one name, or one has no cost.
    """
    _refuse_unusable(candidates)
    limit = settings.memory_fraction * target_bytes
    refusals = {one.name: _refusal(one, settings, limit) for one in candidates}
    refused = tuple(sorted(name for name, refusal in refusals.items() if refusal))
    ranked = sorted(candidates, key=lambda one: (-one.best.value, one.num_bytes, one.name))
    fitting = [one for one in ranked if not refusals[one.name]]
    if not fitting:
        return Selection(NO_SPECULATION, 0, _PLAIN, _nearest_miss(ranked, settings, target_bytes), refusals, refused)
    winner = fitting[0]
    if winner.best.value <= 1.0:
        slower = {one.name: refusals[one.name] or _lost(one, winner) for one in ranked}
        sentence = f"Decode without speculation: the fastest candidate that fits, {winner.name}, {_slower(winner)}"
        return Selection(NO_SPECULATION, 0, _PLAIN, sentence, slower, refused)
    lost = {one.name: refusals[one.name] or _lost(one, winner) for one in ranked if one is not winner}
    return Selection(winner.name, winner.best_k, winner.best, _won(winner, target_bytes), lost, refused)


def over_laws(laws: Sequence[Sequence[CandidateFigures]]) -> list[CandidateFigures]:
    """Return the figures for traffic that has equally many tokens of each law.

    Times add up over laws, so that speedups and tokens per call are harmonic means. Interval bounds
    are averaged alike, which is no narrower than the interval of the average.

    Raises:
        UserError: a candidate was not scored under every law.
    """
    by_law = [{one.name: one for one in candidates} for candidates in laws]
    partial = {name for law in by_law for name in law if any(name not in other for other in by_law)}
    if partial:
        raise UserError(f"{min(partial)} was not scored under every law: score it under the same laws as the others.")
    return [_over_laws([law[name] for law in by_law]) for name in by_law[0]]


def _over_laws(figures: Sequence[CandidateFigures]) -> CandidateFigures:
    first = figures[0]
    lengths = [k for k in first.predicted_speedup if all(k in one.predicted_speedup for one in figures)]
    tokens = {k: _averaged([one.mean_tokens_per_call[k] for one in figures]) for k in lengths}
    speedup = {k: harmonic_mean([one.predicted_speedup[k] for one in figures]) for k in lengths}
    plain = sum(one.plain_seconds for one in figures) / len(figures)
    return replace(first, mean_tokens_per_call=tokens, predicted_speedup=speedup, plain_seconds=plain)


def _averaged(figures: Sequence[Figure]) -> Figure:
    bounds = ([one.value for one in figures], [one.low for one in figures], [one.high for one in figures])
    return Figure(*map(harmonic_mean, bounds))


def harmonic_mean(values: Sequence[float]) -> float:
    """Return the rate over parts of equal work that are done at these rates."""
    return len(values) / sum(1.0 / value for value in values)


def _refuse_unusable(candidates: Sequence[CandidateFigures]) -> None:
    if not candidates:
        raise UserError("There is nothing to choose from: the report holds no drafter.")
    names = [one.name for one in candidates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{twice[0]} stands twice in the report: give each candidate a name of its own.")
    for one in candidates:
        if not one.predicted_speedup or not all(math.isfinite(value) for value in one.predicted_speedup.values()):
            raise UserError(
                f"The report has no cost of {one.name}, so that its speedup is unknown: run evaluate-acceptance "
                "where the target can be timed."
            )


def _refusal(one: CandidateFigures, settings: SelectSettings, limit: float) -> str:
    """Say why the settings rule a candidate out; empty if they do not."""
    if settings.runtime == "transformers":
        if one.kind not in _KINDS_OF_TRANSFORMERS:
            return f"Transformers runs no {one.kind} drafter."
        if one.head_rows:
            twin = f"use its twin {one.full_head_twin}" if one.full_head_twin else "make its twin with the step head"
            return (
                f"It computes {one.head_rows} rows of its head, and transformers takes no map of token ids: {twin}, "
                "which computes them all."
            )
        if one.has_int8_body:
            return "Its cost was measured on 8-bit weights; transformers widens them, and it is no faster there."
    if settings.full_vocabulary and one.head_rows:
        return f"It can say {one.head_rows} tokens only, and full_vocabulary asks for all of the target's."
    if settings.max_joules and one.joules(settings.watts) > settings.max_joules:
        return (
            f"It takes {one.joules(settings.watts):.3g} J a token at {settings.watts:g} W, and max_joules allows "
            f"{settings.max_joules:g}."
        )
    if one.num_bytes > settings.most_bytes:
        return f"It takes {size(float(one.num_bytes))}, and max_bytes allows {size(settings.most_bytes)}."
    if one.num_bytes > limit:
        return f"It takes {size(float(one.num_bytes))}, and the limit is {_limit(settings, limit)}."
    return ""


def _nearest_miss(ranked: Sequence[CandidateFigures], settings: SelectSettings, target_bytes: int) -> str:
    unlimited = settings.model_copy(update={"memory_fraction": math.inf, "max_bytes": 0, "max_joules": 0.0})
    servable = [one for one in ranked if not _refusal(one, unlimited, math.inf)]
    limit = settings.memory_fraction * target_bytes
    small = [one for one in servable if one.num_bytes <= min(limit, settings.most_bytes)]
    if small:
        thrifty = min(small, key=lambda one: one.joules(settings.watts))
        return (
            f"Decode without speculation: no candidate that fits keeps max_joules={settings.max_joules:g}. The nearest "
            f"is {thrifty.name}: {thrifty.joules(settings.watts):.3g} J a token, plain decoding "
            f"{settings.watts * thrifty.plain_seconds:.3g} J."
        )
    too_large = [one for one in servable if one.best.value > 1.0] or servable
    if not too_large:
        return f"Decode without speculation: none of the candidates can be served in {settings.runtime}."
    nearest = min(too_large, key=lambda one: one.num_bytes)
    needed = math.ceil(1000 * nearest.num_bytes / target_bytes) / 1000
    if nearest.num_bytes > settings.most_bytes:
        over = size(nearest.num_bytes - settings.most_bytes)
        also = f" and memory_fraction={needed:g}" if nearest.num_bytes > limit else ""
        return (
            f"Decode without speculation: no candidate fits into max_bytes={settings.max_bytes}. The nearest is "
            f"{nearest.name}, {over} too large: with max_bytes={nearest.num_bytes}{also} it fits, predicted "
            f"{times(nearest.best.value)} at {_length(nearest.best_k)}."
        )
    return (
        f"Decode without speculation: no candidate fits into {_limit(settings, limit)}. The nearest is {nearest.name}, "
        f"{size(nearest.num_bytes - limit)} too large: with memory_fraction {needed:g} it fits, predicted "
        f"{times(nearest.best.value)} at {_length(nearest.best_k)}."
    )


def _won(winner: CandidateFigures, target_bytes: int) -> str:
    bounds = f" (95 % interval {interval(winner.best)})" if winner.best.has_interval else ""
    memory = f"in {percent(winner.num_bytes / target_bytes)} of" if winner.num_bytes else "with none of"
    return (
        f"{winner.name} with {_length(winner.best_k)} a block is predicted to decode {times(winner.best.value)} as "
        f"fast as the target alone{bounds}, {memory} its memory."
    )


def _lost(one: CandidateFigures, winner: CandidateFigures) -> str:
    if one.best.value <= 1.0:
        return f"It {_slower(one)}"
    close = one.best.has_interval and winner.best.has_interval and one.best.high >= winner.best.low
    return (
        f"It is predicted {times(one.best.value)} at {_length(one.best_k)}, {winner.name} {times(winner.best.value)}"
        + ("; their intervals overlap, so that more prompts could turn this." if close else ".")
    )


def _slower(one: CandidateFigures) -> str:
    best = f"{times(one.best.value)} at its best length, {_length(one.best_k)}"
    return f"is predicted {best}: no faster than the target alone."


def _limit(settings: SelectSettings, limit: float) -> str:
    return f"{size(limit)} ({percent(settings.memory_fraction)} of the target)"


def _length(k: int) -> str:
    return f"{k} draft token{'s' if k > 1 else ''}"
