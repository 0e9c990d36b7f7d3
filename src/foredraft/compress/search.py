"""The search: bits, layers and draft length together, each step judged by measured acceptance and predicted seconds.

Greedy with a shortlist: the Fisher-weighted error says which few moves are tried, replay on a bench says what each of
them costs in acceptance, the time model what it saves; the best is taken, and everything is measured again. The target
is the one whose answers are on the bench, at the precision at which it wrote them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.probe import Bench, Probe
from foredraft.compress.quantize import round_to_nearest
from foredraft.compress.rounding import product
from foredraft.compress.sensitivity import sensitivities
from foredraft.compress.units import EMBEDDING, HEAD, Unit, search_units
from foredraft.core import pareto
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.core.protocols import Answer
from foredraft.core.roofline import Machine, PassFacts, block_seconds, pass_seconds
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.layers import keep_layers, layer_stack
from foredraft.models.passes import pass_facts

_PLAIN_BYTES = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A compressed draft, as what is left of the one that the search began with.

    Attributes:
        layers: That stay, by their first numbers.
        bits: Of units that are rounded, by their first names.
    """

    layers: tuple[int, ...]
    bits: Mapping[str, int] = field(default_factory=dict)


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

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "choice"}
        return {**shown, "layers": list(self.choice.layers), "bits": dict(self.choice.bits)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Point":
        kept = {name: value for name, value in data.items() if name not in ("layers", "bits")}
        return Point(choice=Choice(tuple(data["layers"]), dict(data["bits"])), **kept)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may spend; 0 is no limit.

    Attributes:
        bytes: Read by a draft step.
        milliseconds: Of a draft step.
        tries: Moves that are measured before one is taken, of each kind.
        chunk: Units that go down together.
        group: Inputs that share a scale in 4 bits.
    """

    bytes: float = 0.0
    milliseconds: float = 0.0
    tries: int = 2
    chunk: int = 8
    group: int = 32

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


def search(
    draft: Draft,
    bench: Bench,
    answers: Sequence[Answer],
    clock: Clock,
    limits: Limits,
    done: Sequence[Point] = (),
    on_point: Callable[[Sequence[Point]], None] = lambda _: None,
    progress: Progress = SILENT,
) -> list[Point]:
    """Return the points of the search in order, the untouched draft first.

    A move is taken while it raises the predicted speedup; while a limit is not met the one that loses least speedup
    for each byte is taken anyway.

    Args:
        draft: Not quantized; float32. Left as it was.
        answers: That gradients are taken on.
        done: Points of a search that was stopped, which this one goes on from.
        on_point: Told all points after each step.
    """
    figures = sensitivities(draft, answers, WeightFormat(4, limits.group), progress=progress)
    fisher = {one.unit: one.fisher for one in figures}
    points = list(done) or [_measured(draft, Choice(tuple(range(len(layer_stack(draft.model))))), bench, clock, limits)]
    on_point(points)
    while True:
        moves = list(_moves(draft, points[-1].choice, fisher, limits))
        step = f"step {len(points)}, {points[-1].predicted_speedup:.3f}x"
        tried = [
            _measured(draft, choice, bench, clock, limits, move)
            for move, choice in tracked(progress, step, moves, "moves")
        ]
        best = max(tried, key=lambda point: _worth(points[-1], point), default=None)
        if best is None or (limits.meets(points[-1]) and best.predicted_speedup <= points[-1].predicted_speedup):
            return points
        points.append(replace(best, passes=sum(point.passes for point in tried)))
        on_point(points)


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both bytes and predicted speedup, the smallest first."""
    figures = {number: (point.bytes, point.predicted_speedup) for number, point in enumerate(points)}
    return [points[number] for number in pareto.pareto_front(figures)]


def best_point(points: Sequence[Point], limits: Limits) -> Point | None:
    """Return the point of the largest predicted speedup within the limits; None where none is."""
    return max(filter(limits.meets, points), key=lambda point: point.predicted_speedup, default=None)


def formats_of(draft: Draft, choice: Choice, group: int) -> dict[str, WeightFormat]:
    """Return the formats of a choice by the names that units have once its layers are cut out."""
    renumbered = {old: new for new, old in enumerate(choice.layers)}
    found = {}
    for unit in search_units(draft.model):
        if (bits := choice.bits.get(unit.name, 16)) != 16 and (unit.layer < 0 or unit.layer in renumbered):
            name = unit.name if unit.layer < 0 else f"layers.{renumbered[unit.layer]}.{unit.part}"
            found[name] = WeightFormat(bits, group if bits == 4 else 0)
    return found


def _moves(draft: Draft, choice: Choice, fisher: Mapping[str, float], limits: Limits) -> Iterator[tuple[str, Choice]]:
    """Yield the moves that are worth trying, by kind: the least sensitive units a step down, the head, a layer out."""
    units = [unit for unit in search_units(draft.model) if unit.layer in choice.layers]
    for bits in (8, 4):
        above = [unit for unit in units if choice.bits.get(unit.name, 16) > bits]
        above.sort(key=lambda unit: fisher[unit.name] / _count(draft, unit))
        chunks = [above[start : start + limits.chunk] for start in range(0, len(above), limits.chunk)]
        for chunk in chunks[: limits.tries]:
            changed = {**choice.bits, **{unit.name: bits for unit in chunk}}
            yield f"{bits} bits: {', '.join(unit.name for unit in chunk)}", replace(choice, bits=changed)
    if not len(draft.head_token_ids):
        for bits in (8, 4):
            if choice.bits.get(HEAD, 16) > bits:
                yield f"{bits} bits: head", replace(choice, bits={**choice.bits, HEAD: bits})
    inner = sorted(choice.layers[1:-1], key=lambda layer: sum(fisher[u.name] for u in units if u.layer == layer))
    for layer in inner[: limits.tries]:
        yield f"without layer {layer}", replace(choice, layers=tuple(one for one in choice.layers if one != layer))


def _worth(before: Point, after: Point) -> float:
    """Return the predicted speedup that a move gains; one that loses counts by what it loses for each byte it saves."""
    gain = after.predicted_speedup - before.predicted_speedup
    return gain if gain > 0 else gain / max(before.bytes - after.bytes, 1.0)


def _measured(
    draft: Draft, choice: Choice, bench: Bench, clock: Clock, limits: Limits, move: str = "as it was"
) -> Point:
    report = _simulated(draft, choice, bench, limits.group)
    facts = _facts(draft, choice, limits.group)
    best, speedup = 0, 1.0
    for k in bench.ks:
        seconds = block_seconds(facts, clock.machine, 1, k, clock.context)
        seconds += pass_seconds(clock.target, clock.machine, 1, k + 1, clock.context)
        plain = pass_seconds(clock.target, clock.machine, 1, 1, clock.context)
        predicted = report.mean_tokens_per_call(k) * plain / seconds
        if not best or predicted > speedup:
            best, speedup = k, predicted
    step = pass_seconds(facts, clock.machine, 1, 1, clock.context)
    tokens = report.mean_tokens_per_call(best)
    return Point(choice, move, facts.weight_bytes, report.expected_acceptance, best, tokens, speedup, 1e3 * step, 1.0)


def _simulated(draft: Draft, choice: Choice, bench: Bench, group: int) -> AcceptanceReport:
    """Return the report of a choice, with plain weights that hold what its integers stand for."""
    model = keep_layers(draft.model, choice.layers, shared=list(draft.model.parameters()))
    rounded = formats_of(draft, choice, group)
    for unit in search_units(model):
        for module in unit.modules if unit.name in rounded else ():
            linear = model.get_submodule(module)
            weight = product(*round_to_nearest(module, linear.weight.detach(), rounded[unit.name]))
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return Probe(Draft(model, draft.head_token_ids), bench).baseline


def _facts(draft: Draft, choice: Choice, group: int) -> PassFacts:
    """Return what a step of a choice moves and computes, with weights that are not rounded in 16 bits."""
    facts = pass_facts(draft.model, len(draft.head_token_ids))
    units = search_units(draft.model)
    gone = sum(_count(draft, unit) for unit in units if unit.layer >= 0 and unit.layer not in choice.layers)
    read = 0.0
    for unit in units:
        if unit.name != EMBEDDING and (unit.layer < 0 or unit.layer in choice.layers):
            share = len(draft.head_token_ids) / draft.model.get_output_embeddings().out_features or 1.0
            read += _unit_bytes(draft, unit, choice.bits.get(unit.name, 16), group) * (
                share if unit.name == HEAD else 1.0
            )
    kept = len(choice.layers) / facts.layers
    return replace(
        facts,
        weight_bytes=read,
        flops_per_token=facts.flops_per_token - 2.0 * gone,
        attention_flops=facts.attention_flops * kept,
        kv_bytes_per_token=facts.kv_bytes_per_token * kept * _PLAIN_BYTES / draft.model.dtype.itemsize,
        layers=len(choice.layers),
        dtype="bfloat16",
    )


def _count(draft: Draft, unit: Unit) -> int:
    return sum(draft.model.get_submodule(module).weight.numel() for module in unit.modules)


def _unit_bytes(draft: Draft, unit: Unit, bits: int, group: int) -> float:
    weights = [draft.model.get_submodule(module).weight for module in unit.modules]
    if bits == 16:
        return float(sum(weight.numel() for weight in weights) * _PLAIN_BYTES)
    scales = sum(weight.numel() / group if bits == 4 else weight.shape[0] for weight in weights)
    return sum(weight.numel() for weight in weights) * bits / 8 + scales * _PLAIN_BYTES
