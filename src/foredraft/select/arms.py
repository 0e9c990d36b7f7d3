"""What a selector chooses among: every drafter at every draft length, and no speculation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from foredraft.core.errors import UserError

PLAIN = 0
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Arms:
    """The choices, by number; PLAIN is the first: no draft tokens at all.

    Attributes:
        names: Of the drafters.
        drafter: Number of the arm's drafter; NOBODY for PLAIN.
        k: Draft tokens of a block; 0 for PLAIN.
        own: The arms of each drafter, shortest first.
    """

    names: tuple[str, ...]
    drafter: Int64[np.ndarray, " arms"]
    k: Int64[np.ndarray, " arms"]
    own: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str], lengths: Sequence[int]) -> "Arms":
        """Return every drafter at every length.

        Raises:
            UserError: no drafter, no length, or a name that stands twice.
        """
        if not names or not lengths or min(lengths) < 1:
            raise UserError("A selector needs a drafter and draft lengths of 1 or more.")
        if twice := sorted({name for name in names if list(names).count(name) > 1}):
            raise UserError(f"{twice[0]} stands twice among the drafters: name each once.")
        pairs = [(NOBODY, 0), *((number, k) for number in range(len(names)) for k in sorted(set(lengths)))]
        drafter, k = np.array(pairs, np.int64).T
        own = tuple(tuple(np.flatnonzero(drafter == number).tolist()) for number in range(len(names)))
        return Arms(tuple(names), drafter, k, own)

    def __len__(self) -> int:
        return len(self.k)

    @property
    def longest(self) -> int:
        return int(self.k.max())

    def number(self, name: str, k: int) -> int:
        """Return the arm of a drafter at a length.

        Raises:
            UserError: there is no such arm.
        """
        for arm in range(1, len(self)):
            if self.names[self.drafter[arm]] == name and self.k[arm] == k:
                return arm
        raise UserError(
            f"There is no arm {name} with {k} draft tokens: {', '.join(map(self.label, range(len(self))))}."
        )

    def label(self, arm: int) -> str:
        """Return what an arm is called in tables."""
        return "no speculation" if arm == PLAIN else f"{self.names[self.drafter[arm]]} x{self.k[arm]}"
