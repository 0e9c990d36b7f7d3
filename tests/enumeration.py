"""Exact laws of procedures that draw uniforms, by running them on every cell of a grid.

Where all probabilities are fractions whose denominators divide `grid`, a procedure is constant within
each cell, so that its value at the cells' midpoints gives the law exactly. Only the uniforms that a run
really draws are branched on.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)


def exact_law(run: Callable[..., Outcome], grid: int, *given: object) -> dict[Outcome, Fraction]:
    """Return the probability of every outcome of `run(uniform, *given)`."""
    law: dict[Outcome, Fraction] = defaultdict(Fraction)
    cells: list[int] = []
    while True:
        drawn = 0

        def uniform() -> float:
            nonlocal drawn
            if drawn == len(cells):
                cells.append(0)
            drawn += 1
            return (cells[drawn - 1] + 0.5) / grid

        outcome = run(uniform, *given)
        assert drawn == len(cells), "the procedure is not a function of its uniforms"
        law[outcome] += Fraction(1, grid**drawn)
        while cells and cells[-1] == grid - 1:
            cells.pop()
        if not cells:
            return dict(law)
        cells[-1] += 1
