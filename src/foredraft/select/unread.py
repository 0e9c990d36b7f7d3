"""How far each drafter has read one text: it reads the rest where it is asked next, which takes time."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Float64


class Unread:
    """Tokens of one text that each drafter has not read.

    What a drafter reads from one of its blocks to the next is part of the time of a block.

    Attributes:
        tokens: By drafter.
    """

    def __init__(self, num_drafters: int, context: int = 0) -> None:
        self.tokens = np.full(num_drafters, float(context))
        self._size = context

    def start(self, context: int, shared: int = 0) -> None:
        """Begin another text of so many tokens, of which so many are how the last one began."""
        known = np.minimum(self._size - self.tokens, shared)
        self.tokens[:] = context - known
        self._size = context

    def read(self, readers: Collection[int], seconds: Float64[np.ndarray, " drafters"]) -> float:
        """Let some drafters read all; return the seconds that it takes them, from those of each for a token."""
        taken = 0.0
        for number in readers:
            taken += float(self.tokens[number] * seconds[number])
            self.tokens[number] = 0.0
        return taken

    def grow(self, tokens: int, readers: Collection[int]) -> None:
        """Let the text go on behind a block of which some drafters were asked."""
        self._size += tokens
        self.tokens += tokens
        for number in readers:
            self.tokens[number] = 0.0
