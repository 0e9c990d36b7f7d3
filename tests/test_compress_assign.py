"""Laws of giving units formats within a budget."""

from itertools import product

import pytest
import torch

from foredraft.compress.assign import Option, assign
from foredraft.models.compressed import WeightFormat

FOUR, EIGHT, WIDE = WeightFormat(4, 32), WeightFormat(8, 0), WeightFormat(4, 128)


def drawn(seed: int, units: int = 5) -> dict[str, tuple[Option, ...]]:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(units, generator=generator).tolist()
    return {
        f"u{unit}": (Option(WIDE, 410.0, 1.4 * one), Option(FOUR, 450.0, one), Option(EIGHT, 805.0, 0.02 * one))
        for unit, one in enumerate(loss)
    }


@pytest.mark.parametrize("seed", range(6))
def test_it_is_near_the_best_of_all_assignments_and_never_above_the_budget(seed: int) -> None:
    options, budget = drawn(seed), 5 * 520.0
    found = assign(options, budget)
    best = min(
        sum(option.loss for option in some)
        for some in product(*options.values())
        if sum(option.bytes for option in some) <= budget
    )
    assert sum(option.bytes for option in found.values()) <= budget
    assert sum(option.loss for option in found.values()) <= 1.1 * best + 1e-9


def test_budgets_at_the_ends() -> None:
    options = drawn(1)
    assert {option.weight_format for option in assign(options, 5 * 410.0).values()} == {WIDE}
    assert {option.weight_format for option in assign(options, 1e9).values()} == {EIGHT}
    with pytest.raises(ValueError, match="the smallest formats take 2050 bytes, more than 2000"):
        assign(options, 2000.0)


def test_bytes_that_buy_nothing_are_not_spent() -> None:
    """A larger format that loses as much is not taken, and one that loses more never."""
    options = {
        "a": (Option(FOUR, 450.0, 0.1), Option(EIGHT, 805.0, 0.1)),
        "b": (Option(FOUR, 450.0, 0.0), Option(EIGHT, 805.0, 0.2)),
    }
    assert {option.weight_format for option in assign(options, 1e9).values()} == {FOUR}
