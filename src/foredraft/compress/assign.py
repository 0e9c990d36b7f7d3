"""Formats for units within a budget of bytes, where the losses of units add up."""

from collections.abc import Mapping
from dataclasses import dataclass

from foredraft.models.compressed import WeightFormat

_STEPS = 60


@dataclass(frozen=True, slots=True)
class Option:
    """A format that a unit may get.

    Attributes:
        bytes: Of the unit in it.
        loss: Of whatever is kept, with this unit alone in it.
    """

    weight_format: WeightFormat
    bytes: float
    loss: float


def assign(options: Mapping[str, tuple[Option, ...]], budget: float) -> dict[str, Option]:
    """Return an option for each unit with the least sum of losses that was found within a budget of bytes.

    The price of a byte is bisected, each unit taking its best option at that price; what is left is spent on the
    changes that gain most for each byte.

    Raises:
        ValueError: the smallest options together are above the budget.
    """
    cheapest = {unit: min(some, key=lambda one: one.bytes) for unit, some in options.items()}
    if _bytes(cheapest) > budget:
        raise ValueError(f"the smallest formats take {_bytes(cheapest):.0f} bytes, more than {budget:.0f}")
    low, high, chosen = 0.0, 1.0, cheapest
    for _ in range(_STEPS):
        if _bytes(_at_price(options, high)) <= budget:
            break
        low, high = high, high * 2.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = _at_price(options, middle)
        if _bytes(found) <= budget:
            chosen, high = found, middle
        else:
            low = middle
    return _filled(options, dict(chosen), budget)


def _at_price(options: Mapping[str, tuple[Option, ...]], price: float) -> dict[str, Option]:
    return {
        unit: min(some, key=lambda one: (one.loss + price * one.bytes, one.bytes)) for unit, some in options.items()
    }


def _filled(options: Mapping[str, tuple[Option, ...]], chosen: dict[str, Option], budget: float) -> dict[str, Option]:
    while True:
        room = budget - _bytes(chosen)
        better = [
            ((chosen[unit].loss - one.loss) / max(one.bytes - chosen[unit].bytes, 1e-9), unit, number)
            for unit, some in options.items()
            for number, one in enumerate(some)
            if one.loss < chosen[unit].loss and one.bytes - chosen[unit].bytes <= room
        ]
        if not better:
            return chosen
        _, unit, number = max(better)
        chosen[unit] = options[unit][number]


def _bytes(chosen: Mapping[str, Option]) -> float:
    return sum(option.bytes for option in chosen.values())
