"""How far each drafter has read one text: it reads the rest where it is asked next, which takes time."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Float64


class Unread:
    """What each drafter has not read of one text.

    What a drafter reads from one of its blocks to the next is part of the time of a block, and not counted here.

    Attributes:
        size: Tokens of the text.
        read_to: By drafter: tokens that it has read, from the first on.
    """

    def __init__(self, num_drafters: int) -> None:
        self.size, self.read_to = 0, np.zeros(num_drafters)

    def start(self, size: int, shared: int = 0) -> None:
        """Begin another text of so many tokens, which begins with so many of the last one's."""
        self.size, self.read_to = size, np.minimum(self.read_to, shared)

    def tokens(self, drafter: int) -> float:
        """Return how many tokens a drafter has not read."""
        return self.size - self.read_to.item(drafter)

    def read(self, readers: Collection[int], seconds: Float64[np.ndarray, " drafters"]) -> float:
        """Let some drafters read all; return the seconds that it takes them, from those of each for a token."""
        taken = 0.0
        for drafter in readers:
            if waiting := self.tokens(drafter):
                taken += waiting * seconds.item(drafter)
                self.read_to[drafter] = self.size
        return taken

    def grow(self, tokens: int, readers: Collection[int]) -> None:
        """Let the text go on behind a block of which some drafters were asked."""
        self.size += tokens
        for drafter in readers:
            self.read_to[drafter] = self.size
