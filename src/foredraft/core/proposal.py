"""What a drafter offers for one block."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

ONE_HOT = -1
ROOT = -1


@dataclass(frozen=True, slots=True)
class Laws:
    """The law each draft token was drawn from; one-hot rows take no memory.

    Attributes:
        dense: The rows that are not one-hot, each summing to 1.
        row: For each draft token its row in `dense`, or ONE_HOT.
    """

    dense: Float[Tensor, "rows vocab"]
    row: Int[Tensor, " k"]

    @staticmethod
    @lru_cache(maxsize=256)
    def one_hot(k: int, vocab_size: int) -> "Laws":
        """Return the laws of k certain tokens, the same object every time: making it took longer than a lookup."""
        return Laws(torch.empty(0, vocab_size), torch.full((k,), ONE_HOT))

    @staticmethod
    def from_dense(probs: Float[Tensor, "k vocab"]) -> "Laws":
        return Laws(probs, torch.arange(probs.shape[0]))

    def is_one_hot(self, index: int) -> bool:
        return int(self.row[index]) == ONE_HOT

    def probs(self, index: int, token_id: int) -> Float[Tensor, " vocab"]:
        """Return the whole law of draft token `index`, whose id is `token_id`."""
        row = int(self.row[index])
        if row != ONE_HOT:
            return self.dense[row]
        hot = torch.zeros(self.dense.shape[1], device=self.dense.device)
        hot[token_id] = 1.0
        return hot


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one block with their laws. An empty one means "no guess".

    Attributes:
        token_ids: The draft tokens; parents come before children.
        laws: The law each was drawn from, given its parent's path.
        parents: Index of each token's parent, ROOT for children of the context. A chain is
            (ROOT, 0, 1, ...).
    """

    token_ids: Int[Tensor, " k"]
    laws: Laws
    parents: tuple[int, ...]

    @staticmethod
    def empty(vocab_size: int) -> "Proposal":
        return Proposal.chain(torch.empty(0, dtype=torch.long), Laws.one_hot(0, vocab_size))

    @staticmethod
    def chain(token_ids: Int[Tensor, " k"], laws: Laws) -> "Proposal":
        return Proposal(token_ids, laws, _chained(token_ids.size(0)))

    @staticmethod
    def certain(token_ids: Int[Tensor, " k"], vocab_size: int) -> "Proposal":
        """Return a chain of one-hot guesses."""
        return Proposal.chain(token_ids, Laws.one_hot(token_ids.size(0), vocab_size))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == _chained(len(self))


@lru_cache(maxsize=256)
def _chained(k: int) -> tuple[int, ...]:
    """Return the parents of k tokens of which each follows the one before it."""
    return tuple(range(-1, k - 1))
