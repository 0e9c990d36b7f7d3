"""Exact laws of procedures that draw uniforms: run them once for every way the draws can fall.

`exact_law` hands in uniforms on a grid. Where all probabilities are fractions whose denominators divide the grid, a
procedure is constant within each cell, so that the cells' midpoints give its law exactly. `forked_law` hands in
uniforms that fork where production code compares them with a threshold, or draws a token by them: exact for any
probabilities and far fewer runs, at the price of a patched sample_index.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from fractions import Fraction
from typing import TypeVar
from unittest.mock import patch

from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)

_DRAWERS = ("foredraft.decoding.rules", "foredraft.decoding.trees", "tests.toys")


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


def forked_law(run: Callable[[Callable[[], float]], Outcome]) -> dict[Outcome, float]:
    """Return the probability of every outcome of `run(uniform)`."""
    law: dict[Outcome, float] = defaultdict(float)
    fork = _Fork()
    with ExitStack() as stack:
        for module in _DRAWERS:
            stack.enter_context(patch(f"{module}.sample_index", fork.draw))
        while True:
            outcome = run(lambda: _Forking(fork))
            law[outcome] += fork.chance
            if not fork.advance():
                return dict(law)


class _Forking(float):
    """A uniform whose comparison with a threshold goes both ways, one run after the other."""

    def __new__(cls, fork: "_Fork") -> "_Forking":
        return super().__new__(cls, 0.5)

    def __init__(self, fork: "_Fork") -> None:
        self._fork = fork

    def __lt__(self, threshold: float) -> bool:
        return self._fork.choose([threshold, 1.0 - threshold]) == 0


class _Fork:
    """Depth-first walk over the choices of a run; choices of chance 0 are not walked."""

    def __init__(self) -> None:
        self._chosen: list[tuple[int, list[float]]] = []
        self._at = 0

    @property
    def chance(self) -> float:
        product = 1.0
        for index, chances in self._chosen:
            product *= chances[index]
        return product

    def draw(self, probs: Tensor, uniform: float) -> int:
        chances = (probs.double() / probs.double().sum()).tolist()
        return self.choose(chances)

    def choose(self, chances: list[float]) -> int:
        if self._at == len(self._chosen):
            self._chosen.append((_next_possible(chances, -1), chances))
        self._at += 1
        return self._chosen[self._at - 1][0]

    def advance(self) -> bool:
        self._at = 0
        while self._chosen:
            index, chances = self._chosen.pop()
            if (after := _next_possible(chances, index)) < len(chances):
                self._chosen.append((after, chances))
                return True
        return False


def _next_possible(chances: list[float], index: int) -> int:
    return next((later for later in range(index + 1, len(chances)) if chances[later] > 0.0), len(chances))
