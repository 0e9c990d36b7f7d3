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

    The price of a byte is bisected, each unit taking its best option at that price; then one or two units are changed
    at a time while that helps.

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
    return _improved(options, dict(chosen), budget)


def _at_price(options: Mapping[str, tuple[Option, ...]], price: float) -> dict[str, Option]:
    return {
        unit: min(some, key=lambda one: (one.loss + price * one.bytes, one.bytes)) for unit, some in options.items()
    }


def _improved(options: Mapping[str, tuple[Option, ...]], chosen: dict[str, Option], budget: float) -> dict[str, Option]:
    """Return what is left when no change of one unit, or of two together, loses less within the budget."""
    while True:
        room = budget - _bytes(chosen)
        changes = [
            (one.loss - chosen[unit].loss, one.bytes - chosen[unit].bytes, unit, one)
            for unit, some in options.items()
            for one in some
        ]
        gains = [change for change in changes if change[0] < 0]
        # A change to the option that stands already costs nothing, so that pairs hold single changes too.
        pairs = (
            (first, second)
            for first in gains
            for second in changes
            if first[2] != second[2] and first[1] + second[1] <= room and first[0] + second[0] < -1e-12
        )
        best = min(pairs, key=lambda pair: pair[0][0] + pair[1][0], default=None)
        if best is None:
            return chosen
        for _, _, unit, option in best:
            chosen[unit] = option


def _bytes(chosen: Mapping[str, Option]) -> float:
    return sum(option.bytes for option in chosen.values())
