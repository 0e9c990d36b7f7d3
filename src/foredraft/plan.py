"""Which shape of draft could pay for a target on some hardware, before anything is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.acceptance.wording import NO_BREAK, size, times
from foredraft.core.errors import UserError
from foredraft.core.roofline import PassFacts, block_seconds, needed_bytes, pass_seconds
from foredraft.core.speedup import break_even_acceptance, expected_tokens_per_call
from foredraft.hardware.profile import load_profile

_LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """A draft made of the target's own layers and head.

    Attributes:
        layers: Decoder layers of it.
        vocabulary: Rows of the head that are computed.
    """

    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a shape would need and could bring.

    Attributes:
        cost_ratio: Time of a draft step / of a target step.
        break_even: Least acceptance, the same for every token, at which some length pays; 1 where none does.
        k: That length.
        at_best: Speedup at the best length if every 4 of 5 draft tokens were accepted.
        num_bytes: Memory of the draft with its context.
        fits: Whether it keeps the memory fraction.
    """

    shape: Shape
    cost_ratio: float
    break_even: float
    k: int
    at_best: float
    num_bytes: float
    fits: bool


def draft_facts(target: PassFacts, width: int, vocabulary: int, shape: Shape) -> PassFacts:
    """Return what a pass of a draft of that shape moves and computes.

    Args:
        width, vocabulary: Of the target: hidden size, and rows of its head.
    """
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}.get(target.dtype, 4)
    head = float(vocabulary * width)
    body_bytes = target.weight_bytes - head * itemsize
    body_flops = target.flops_per_token - 2.0 * head
    share = shape.layers / target.layers
    rows = float(shape.vocabulary * width)
    table = target.resident_bytes - target.weight_bytes  # none of its own where the head is tied to it
    if not table and shape.vocabulary < vocabulary:
        table = head * itemsize
    return replace(
        target,
        weight_bytes=share * body_bytes + rows * itemsize,
        resident_bytes=share * body_bytes + rows * itemsize + table,
        flops_per_token=share * body_flops + 2.0 * rows,
        attention_flops=share * target.attention_flops,
        kv_bytes_per_token=share * target.kv_bytes_per_token,
        layers=shape.layers,
    )


def plan_shapes(
    target: PassFacts,
    width: int,
    vocabulary: int,
    hardware: str,
    shapes: Sequence[Shape],
    rows: int = 1,
    context: int = 1024,
    memory_fraction: float = 0.1,
) -> list[Prospect]:
    """Return every shape with the acceptance from which on it pays, the easiest first.

    Raises:
        UserError: a shape has more layers or tokens than the target.
        UnknownNameError: no such hardware.
    """
    machine = load_profile(hardware).machine()
    plain = pass_seconds(target, machine, rows, 1, context)
    found = []
    for shape in shapes:
        if not (0 < shape.layers <= target.layers and 0 < shape.vocabulary <= vocabulary):
            raise UserError(
                f"A draft of {shape.layers} layers and {shape.vocabulary} tokens cannot be cut from a target of "
                f"{target.layers} and {vocabulary}."
            )
        draft = draft_facts(target, width, vocabulary, shape)
        blocks = {
            k: (block_seconds(draft, machine, rows, k, context) + pass_seconds(target, machine, rows, k + 1, context))
            / plain
            for k in _LENGTHS
        }
        needs = {k: break_even_acceptance(k, block) for k, block in blocks.items()}
        easiest = min(needs, key=lambda k: (needs[k], k))
        best = max(expected_tokens_per_call(0.8, k) / block for k, block in blocks.items())
        held = needed_bytes(draft, rows, context)
        limit = memory_fraction * needed_bytes(target, rows, context)
        ratio = pass_seconds(draft, machine, rows, 1, context) / plain
        found.append(Prospect(shape, ratio, needs[easiest], easiest, best, held, held <= limit))
    return sorted(found, key=lambda one: (one.break_even, one.num_bytes))


def default_shapes(layers: int, vocabulary: int) -> list[Shape]:
    """Return shapes worth a look: a few layers to half of them, with the whole head and with trimmed ones."""
    depths = sorted({depth for depth in (1, 2, 4, 6, layers // 4, layers // 2) if 1 <= depth < layers})
    heads = sorted({rows for rows in (8192, 16384, 32768, vocabulary) if rows <= vocabulary})
    return [Shape(depth, rows) for depth in depths for rows in heads]


def plan_json(prospects: Sequence[Prospect], hardware: str, rows: int, context: int) -> dict[str, Any]:
    """Return a plan as plain values."""
    return {
        "hardware": hardware,
        "batch_size": rows,
        "context": context,
        "shapes": [
            {
                "layers": one.shape.layers,
                "vocabulary": one.shape.vocabulary,
                "cost_ratio": one.cost_ratio,
                "break_even_acceptance": one.break_even,
                "k": one.k,
                "speedup_at_0.8": one.at_best,
                "bytes": one.num_bytes,
                "fits": one.fits,
                "can_pay": one.break_even < 1.0,
            }
            for one in prospects
        ],
    }


def plan_table(plan: Mapping[str, Any]) -> str:
    """Return a plan as text."""
    lines = [
        f"{plan['hardware']}, {plan['batch_size']} request(s), context {plan['context']}: acceptance from which on a "
        "draft of that shape pays.",
        f"{'layers':>7}{'vocabulary':>12}{'cost ratio':>12}{'pays from':>11}{'at k':>6}{'at .8':>8}{'memory':>11}",
    ]
    for one in plan["shapes"]:
        pays = f"{one['break_even_acceptance']:.2f}" if one["can_pay"] else "never"
        lines.append(
            f"{one['layers']:>7}{one['vocabulary']:>12}{one['cost_ratio']:>12.3f}{pays:>11}{one['k']:>6}"
            f"{times(one['speedup_at_0.8']):>8}{size(one['bytes']):>11}{'' if one['fits'] else f'{NO_BREAK}too large'}"
        )
    return "\n".join(lines)
