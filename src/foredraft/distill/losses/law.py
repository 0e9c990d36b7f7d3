"""The target's law as training reads it: spread over events.

A position's law is spread over *events*: the target's most probable tokens, each an event of its own, and
one last event for all other tokens of the draft's head (the tail). A law known in full is the case where
every token is an event and the tail is empty. By the data-processing inequality no distance over events
exceeds the same distance over tokens; they are equal when the tail is empty.

Mass of the target on tokens that the draft cannot say (rows cut from its head) counts as rejected. It is
never renormalised away: such events have target probability 0 here, and the rest sums to less than 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

UNSAYABLE = -1
# Logit and log-probability of an event that the draft cannot say. Finite, so that 0 times it is 0.
ABSENT = -1e30


@dataclass(frozen=True, slots=True)
class EventLaw:
    """The target's law at some positions, spread over the draft's events.

    Attributes:
        rows: Rows of the draft's head that are events of their own, or UNSAYABLE. No row twice.
        probs: Target probability of each event, the tail last.
        emitted: Event of the token that the target emitted.
        whole: Whether event i is row i of the head, for every row, and the tail is empty.
    """

    rows: Int[Tensor, "positions top"]
    probs: Float[Tensor, "positions 1+top"]
    emitted: Int[Tensor, " positions"]
    whole: bool = False

    @staticmethod
    def full(probs: Float[Tensor, "positions vocab"], emitted: Int[Tensor, " positions"]) -> "EventLaw":
        """Return the law in which every row of the head is an event and the tail is empty."""
        rows = torch.arange(probs.shape[1], device=probs.device).expand(probs.shape)
        return EventLaw(rows, torch.nn.functional.pad(probs, (0, 1)), emitted, whole=True)

    def to(self, device: torch.device) -> "EventLaw":
        """Return the law on another device."""
        return replace(self, rows=self.rows.to(device), probs=self.probs.to(device), emitted=self.emitted.to(device))

    def __len__(self) -> int:
        return len(self.emitted)

    def __getitem__(self, positions: slice) -> "EventLaw":
        return EventLaw(self.rows[positions], self.probs[positions], self.emitted[positions], self.whole)


@runtime_checkable
class Laws(Protocol):
    """The target's law at many positions, made for some of them when asked; an EventLaw is one."""

    def __len__(self) -> int:
        """Number of positions."""

    def __getitem__(self, positions: slice) -> EventLaw:
        """Return the law at a run of positions; the same one each time."""

    def to(self, device: torch.device) -> "Laws":
        """Return the same laws, given out on another device."""


# A distance of the draft's law, given as log-probabilities of the same events, at each position. A draft's events
# sum to 1; an event that it cannot say has ABSENT.
Loss = Callable[[EventLaw, Float[Tensor, "positions events"]], Float[Tensor, " positions"]]
