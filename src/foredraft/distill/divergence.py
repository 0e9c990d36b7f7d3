"""Noticing that a training has gone astray although its loss is finite."""

import math
from collections import deque
from typing import final


@final
class DivergenceWatch:
    """Compares each loss with the lowest running mean so far.

    A single batch may be easy or hard, so that neither one low loss nor one high loss says anything: the minimum is
    that of the mean over `steps` losses, and only `steps` losses in a row that are all above `factor` times it count.
    """

    def __init__(self, factor: float, steps: int) -> None:
        """Watch; a factor of 0 never sees anything."""
        self._factor = factor
        self._steps = steps
        self._recent: deque[float] = deque(maxlen=steps)
        self._above = 0
        self._lowest = math.inf

    @property
    def is_suspicious(self) -> bool:
        """Whether the last loss was too high."""
        return self._above > 0

    def has_diverged(self, loss: float) -> bool:
        """Take the next loss in; return whether that many in a row were too high."""
        self._above = self._above + 1 if self._factor > 0 and loss > self._factor * self._lowest else 0
        self._recent.append(loss)
        if len(self._recent) == self._steps:
            self._lowest = min(self._lowest, sum(self._recent) / self._steps)
        return self._above >= self._steps

    def look_again(self) -> None:
        """Go on behind weights that came back; the lowest mean still holds."""
        self._recent.clear()
        self._above = 0

    def start_over(self) -> None:
        """Forget everything, since another loss is made small from here on."""
        self.look_again()
        self._lowest = math.inf
