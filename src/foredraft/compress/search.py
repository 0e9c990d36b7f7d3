"""The search: bits, layers, widths, rows and draft length together, each step judged by measured acceptance and
predicted seconds.

Greedy with a shortlist and lookahead: the Fisher-weighted error says which few moves are tried; replay on a part of a
bench says what each of them costs in acceptance, the time model what it saves; the best is taken and measured on the
whole bench. Moves that do not pay are followed for a few steps, in case the next one does. The target is the one whose
answers are on the bench, at the precision at which it wrote them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.choice import Choice, Cutters, cut_draft, formats_of, simulated, step_facts
from foredraft.compress.moves import Move, Reach, Tries, moves
from foredraft.compress.probe import Bench, measure
from foredraft.compress.sensitivity import sensitivities
from foredraft.core import pareto
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.core.protocols import Answer
from foredraft.core.roofline import Machine, PassFacts, block_seconds, pass_seconds
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.layers import layer_stack

_CHOICE = ("layers", "bits", "ffn", "rows")


@dataclass(frozen=True, slots=True)
class Point:
    """A choice with what it is worth.

    Attributes:
        move: What led to it from the point before.
        bytes: Read by a step, with plain weights in 16 bits.
        acceptance: expected_acceptance on the bench.
        k: Draft length of the largest predicted speedup.
        milliseconds: Of a draft step.
        passes: Over the bench, spent on finding it.
        tries: Moves that were tried for it.
    """

    choice: Choice
    move: str
    bytes: float
    acceptance: float
    k: int
    mean_tokens_per_call: float
    predicted_speedup: float
    milliseconds: float
    passes: float = 0.0
    tries: int = 0

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "choice"}
        chosen = self.choice
        return {
            **shown,
            "layers": list(chosen.layers),
            "bits": dict(chosen.bits),
            "ffn": chosen.ffn,
            "rows": chosen.rows,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Point":
        kept = {name: value for name, value in data.items() if name not in _CHOICE}
        return Point(choice=Choice(tuple(data["layers"]), dict(data["bits"]), data["ffn"], data["rows"]), **kept)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may spend; 0 is no limit.

    Attributes:
        bytes: Read by a draft step.
        milliseconds: Of a draft step.
        share: Of the bench that moves are tried on.
        lookahead: Steps that are taken although they do not pay, before the search ends.
    """

    bytes: float = 0.0
    milliseconds: float = 0.0
    share: float = 0.2
    lookahead: int = 1

    def meets(self, point: Point) -> bool:
        return (not self.bytes or point.bytes <= self.bytes) and (
            not self.milliseconds or point.milliseconds <= self.milliseconds
        )


@dataclass(frozen=True, slots=True)
class Clock:
    """What times are predicted from: the target's passes, the machine, tokens of context."""

    target: PassFacts
    machine: Machine
    context: int = 256

    def worth(self, report: AcceptanceReport, facts: PassFacts, choice: Choice, move: str) -> Point:
        """Return the point of a draft that was measured, at its best draft length."""
        best, speedup = 0, 0.0
        plain = pass_seconds(self.target, self.machine, 1, 1, self.context)
        for k in report.ks:
            seconds = block_seconds(facts, self.machine, 1, k, self.context)
            seconds += pass_seconds(self.target, self.machine, 1, k + 1, self.context)
            predicted = report.mean_tokens_per_call(k) * plain / seconds
            if predicted > speedup:
                best, speedup = k, predicted
        step = 1e3 * pass_seconds(facts, self.machine, 1, 1, self.context)
        tokens = report.mean_tokens_per_call(best)
        return Point(choice, move, facts.weight_bytes, report.expected_acceptance, best, tokens, speedup, step)


def search(
    draft: Draft,
    bench: Bench,
    answers: Sequence[Answer],
    clock: Clock,
    limits: Limits,
    reach: Reach,
    cutters: Cutters,
    done: Sequence[Point] = (),
    on_point: Callable[[Sequence[Point]], None] = lambda _: None,
    progress: Progress = SILENT,
) -> list[Point]:
    """Return the points of the search in order, the untouched draft first.

    While a limit is not met, and for `lookahead` steps once moves no longer pay, the move is taken that loses least
    predicted speedup for each byte.

    Args:
        draft: Not quantized; float32. Left as it was.
        answers: That gradients are taken on.
        done: Points of a search that was stopped, which this one goes on from.
        on_point: Told all points after each step.
    """
    figures = sensitivities(draft, answers, WeightFormat(4, reach.group), progress=progress)
    fisher = {one.unit: one.fisher for one in figures}
    start = Move("as it was", Choice(tuple(range(len(layer_stack(draft.model))))))
    points = list(done) or [_measured(draft, start, bench, clock, reach, cutters)]
    on_point(points)
    small = bench.part(limits.share)
    while not _has_ended(points, limits):
        found = list(moves(draft, points[-1].choice, fisher, reach))
        if not found:
            break
        tries = Tries(draft, points[-1].choice, small, cutters, reach.group)
        before = _judged(draft, Move("", points[-1].choice), tries.baseline, clock, reach, cutters)
        step = f"step {len(points)}, {points[-1].predicted_speedup:.3f}x"
        worth = [
            _worth(before, _judged(draft, move, tries.report(move.choice), clock, reach, cutters))
            for move in tracked(progress, step, found, "moves")
        ]
        taken = found[max(range(len(found)), key=worth.__getitem__)]
        after = _measured(draft, taken, bench, clock, reach, cutters)
        spent = tries.passes * small.num_tokens / bench.num_tokens
        points.append(replace(after, passes=spent, tries=len(found)))
        on_point(points)
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both bytes and predicted speedup, the smallest first."""
    figures = {number: (point.bytes, point.predicted_speedup) for number, point in enumerate(points)}
    return [points[number] for number in pareto.pareto_front(figures)]


def best_point(points: Sequence[Point], limits: Limits) -> Point | None:
    """Return the point of the largest predicted speedup within the limits; None where none is."""
    return max(filter(limits.meets, points), key=lambda point: point.predicted_speedup, default=None)


def _has_ended(points: Sequence[Point], limits: Limits) -> bool:
    """Return whether the limits are met and the last steps, more than are looked ahead, brought nothing."""
    best = best_point(points, limits)
    return best is not None and len(points) - 1 - points.index(best) > limits.lookahead


def _worth(before: Point, after: Point) -> float:
    """Return the predicted speedup that a move gains; one that loses counts by what it loses for each byte it saves."""
    gain = after.predicted_speedup - before.predicted_speedup
    return gain if gain > 0 else gain / max(before.bytes - after.bytes, 1.0)


def _judged(draft: Draft, move: Move, report: AcceptanceReport, clock: Clock, reach: Reach, cutters: Cutters) -> Point:
    plain = cut_draft(draft, move.choice, cutters)
    return clock.worth(report, step_facts(plain, formats_of(draft, move.choice, reach.group)), move.choice, move.name)


def _measured(draft: Draft, move: Move, bench: Bench, clock: Clock, reach: Reach, cutters: Cutters) -> Point:
    plain, formats = cut_draft(draft, move.choice, cutters), formats_of(draft, move.choice, reach.group)
    return clock.worth(measure(simulated(plain, formats), bench), step_facts(plain, formats), move.choice, move.name)
