"""What a runtime should count: foredraft's own literal decoding, seen as each runtime counts blocks.

Runtimes differ in whether the first token of an answer is drafted for, and in how many draft tokens the last block of
an answer may have. Blocks begin at the same places in all of them, which is why one literal run answers for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.law import GREEDY
from foredraft.core.protocols import Drafter
from foredraft.decoding.speculative import BlockCount, Limits, TargetSession, decode

Ends = Literal["whole", "room", "spare", "cropped"]


@dataclass(frozen=True, slots=True)
class Counting:
    """How a runtime counts.

    Attributes:
        first_is_plain: The first token of an answer comes with the prompt, without a draft.
        ends: Draft tokens of a block where r tokens may still follow: "whole" k, "room" min(k, r), "spare"
            min(k, r - 1), which leaves room for the token that the target adds. "cropped" is whole while r > 1, and
            of accepted ones r - 1 are counted.
    """

    first_is_plain: bool
    ends: Ends

    def longest(self, k: int, room: int) -> int:
        if self.ends == "cropped":
            return k if room > 1 else 0
        return {"whole": k, "room": min(k, room), "spare": min(k, room - 1)}[self.ends]

    def most_accepted(self, offered: int, room: int) -> int:
        return min(offered, room - 1) if self.ends == "cropped" else offered


@dataclass(frozen=True, slots=True)
class Counted:
    """Blocks of one answer, or of several; None for what a runtime does not say.

    Attributes:
        blocks: Target calls with draft tokens.
        drafted, accepted: Draft tokens offered and accepted.
        by_position: Blocks whose draft token of each position was accepted.
    """

    blocks: int | None
    drafted: int | None
    accepted: int
    by_position: tuple[int, ...] | None

    def agrees_with(self, other: "Counted") -> bool:
        """Return whether all that both say is the same."""
        pairs = zip(self._said(), other._said(), strict=True)
        return all(one is None or two is None or one == two for one, two in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_position": None if self.by_position is None else list(self.by_position),
        }

    def _said(self) -> tuple[Any, ...]:
        return self.blocks, self.drafted, self.accepted, self.by_position

    @staticmethod
    def total(parts: Sequence["Counted"]) -> "Counted":
        """Return the sums; None where one of them does not say."""
        positions = [part.by_position for part in parts]
        by_position = (
            None if None in positions else tuple(sum(column) for column in zip(*filter(None, positions), strict=True))
        )
        return Counted(
            _sum([part.blocks for part in parts]),
            _sum([part.drafted for part in parts]),
            sum(part.accepted for part in parts),
            by_position,
        )


def literal_counts(
    session: TargetSession,
    drafter: Drafter,
    prompt_ids: Int[Tensor, " tokens"],
    first_token: int,
    max_new_tokens: int,
    k: int,
    counting: Counting,
) -> Counted:
    """Decode greedily and count blocks as a runtime does that stops after max_new_tokens.

    Args:
        drafter: Bound to the greedy law.
        first_token: Of the target's plain greedy answer.
    """
    context = torch.cat([prompt_ids, prompt_ids.new_tensor([first_token])]) if counting.first_is_plain else prompt_ids
    asked = max_new_tokens - counting.first_is_plain
    if asked < 1:
        return Counted(0, 0, 0, (0,) * k)
    limits = Limits(asked + k + 1)  # further than the answer, so that its last block is a whole one
    blocks = decode(session, drafter, context, GREEDY, k, limits, torch.Generator()).blocks
    return _as_counted(blocks, asked, k, counting)


def _as_counted(blocks: Sequence[BlockCount], asked: int, k: int, counting: Counting) -> Counted:
    drafted, accepted, written = [], [], 0
    for block in blocks:
        if written >= asked:
            break
        offered = min(block.drafted, counting.longest(k, asked - written))
        if offered:
            drafted.append(offered)
            accepted.append(min(block.accepted, counting.most_accepted(offered, asked - written)))
        written += block.emitted
    by_position = tuple(sum(one > place for one in accepted) for place in range(k))
    return Counted(len(drafted), sum(drafted), sum(accepted), by_position)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
