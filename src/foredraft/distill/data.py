"""What a training step reads: answers from traces, packed so that nothing is computed twice or padded.

Answers to one prompt form a group: the same prompt under several sampling laws, and the turns of one
conversation. A group becomes one tree of tokens in which texts that begin alike share their beginning,
so that a prompt is run once for all of its answers; each token attends to its own ancestors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import TraceError
from foredraft.distill.losses import UNSAYABLE, EventLaw
from foredraft.models.head import NO_IDS
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace


@dataclass(frozen=True, slots=True)
class Example:
    """One answer, and the temperature of the law that the trace stored for it."""

    row: TraceRow
    temperature: float


Group = tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of packed tokens that attend to each other only: [start, end), with an additive mask of 0 and -inf."""

    start: int
    end: int
    mask: Float[Tensor, "tokens tokens"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Groups in one row, without padding.

    Attributes:
        token_ids, position_ids: Of every packed token.
        blocks: One for each group, in order; together they cover the row.
        read: Packed tokens whose hidden states guess the answer tokens, position by position.
        temperatures: Of the stored law at each of those positions.
        law: The target's law there.
    """

    token_ids: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]
    blocks: tuple[Block, ...]
    read: Int[Tensor, " positions"]
    temperatures: Float[Tensor, " positions"]
    law: EventLaw

    def to(self, device: torch.device) -> "Pack":
        """Return the pack on another device."""
        return Pack(
            self.token_ids.to(device),
            self.position_ids.to(device),
            tuple(replace(block, mask=block.mask.to(device)) for block in self.blocks),
            self.read.to(device),
            self.temperatures.to(device),
            self.law.to(device),
        )


def read_groups(traces: Sequence[Trace]) -> list[Group]:
    """Return the answers of all traces, grouped by prompt, in the order in which prompts first appear.

    Raises:
        TraceError: there is no answer.
    """
    groups: dict[str, list[Example]] = {}
    for trace in traces:
        for row in trace.rows():
            if len(row.answer_ids):
                groups.setdefault(row.prompt_id, []).append(Example(row, trace.info.stored_law.temperature))
    if not groups:
        raise TraceError(f"There is no answer to learn from in {', '.join(str(trace.path) for trace in traces)}.")
    return [tuple(examples) for examples in groups.values()]


def plan_steps(groups: Sequence[Group], tokens: int, batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the groups of each training step: whole permutations, one after another, cut into steps.

    A step ends with the group that brings it to `batch_tokens` answer positions, the last one when
    `tokens` are reached in all. Depends on nothing but the arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [num_positions(group) for group in groups]
    steps: list[list[int]] = []
    step: list[int] = []
    total = filled = 0
    while total < tokens:
        for index in torch.randperm(len(groups), generator=generator).tolist():
            step.append(index)
            filled += sizes[index]
            total += sizes[index]
            if filled >= batch_tokens or total >= tokens:
                steps.append(step)
                step, filled = [], 0
            if total >= tokens:
                break
    return steps


def num_positions(group: Group) -> int:
    """Return the number of answer tokens in a group."""
    return sum(len(example.row.answer_ids) for example in group)


def pack(groups: Sequence[Group], row_of_token: Int[Tensor, " vocab"]) -> Pack:
    """Lay groups side by side in one row; `row_of_token` gives the head's row of each token, or UNSAYABLE."""
    token_ids, position_ids, blocks, read, temperatures, laws = [], [], [], [], [], []
    start = 0
    for group in groups:
        tree = _Tree()
        for example in group:
            row = example.row
            path = tree.add(torch.cat([row.prompt_ids, row.answer_ids[:-1]]))
            read.append(start + path[len(row.prompt_ids) - 1 :])
            temperatures.append(torch.full((len(row.answer_ids),), example.temperature))
            laws.append(event_law(row, row_of_token))
        token_ids.append(tree.token_ids)
        position_ids.append(tree.position_ids)
        blocks.append(Block(start, start + len(tree.token_ids), tree.mask()))
        start = blocks[-1].end
    return Pack(
        torch.cat(token_ids),
        torch.cat(position_ids),
        tuple(blocks),
        torch.cat(read),
        torch.cat(temperatures),
        _joined(laws),
    )


def event_law(row: TraceRow, row_of_token: Int[Tensor, " vocab"]) -> EventLaw:
    """Return the stored law at each answer token over the rows of a draft's head.

    An emitted token that is not among the stored ones takes the place of the least probable of them,
    whose mass goes to the tail.
    """
    token_ids, probs, tail = row.top_ids.long(), row.top_logprobs.float().exp(), row.tail_mass.clone()
    hits = token_ids == row.answer_ids[:, None]
    missed = ~hits.any(-1)
    emitted_probs = torch.minimum(row.logprobs[missed].exp(), probs[missed, -1])
    tail[missed] += probs[missed, -1] - emitted_probs
    token_ids[missed, -1], probs[missed, -1], hits[missed, -1] = row.answer_ids[missed], emitted_probs, True
    return EventLaw(row_of_token[token_ids], torch.cat([probs, tail[:, None]], -1), hits.int().argmax(-1))


def rows_of_tokens(head_token_ids: Int[Tensor, " kept"], vocab_size: int) -> Int[Tensor, " vocab"]:
    """Return the head's row of each token, UNSAYABLE for tokens whose row was cut; an empty list cuts none."""
    if not len(head_token_ids):
        return torch.arange(vocab_size)
    rows = torch.full((vocab_size,), UNSAYABLE)
    rows[head_token_ids] = torch.arange(len(head_token_ids))
    return rows


class _Tree:
    """Token sequences that share their common beginnings."""

    def __init__(self) -> None:
        self.token_ids = NO_IDS
        self.position_ids = NO_IDS
        self._paths: list[Tensor] = []

    def add(self, token_ids: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """Add one sequence and return the node of each of its tokens."""
        shared = max((self._shared(path, token_ids) for path in self._paths), key=len, default=NO_IDS)
        fresh = torch.arange(len(token_ids) - len(shared)) + len(self.token_ids)
        self.token_ids = torch.cat([self.token_ids, token_ids[len(shared) :]])
        self.position_ids = torch.cat([self.position_ids, torch.arange(len(shared), len(token_ids))])
        self._paths.append(torch.cat([shared, fresh]))
        return self._paths[-1]

    def mask(self) -> Float[Tensor, "nodes nodes"]:
        """Return 0 where the column is an ancestor of the row or the row itself, -inf elsewhere."""
        mask = torch.full((len(self.token_ids), len(self.token_ids)), float("-inf"))
        for path in self._paths:
            mask[path[:, None], path] = torch.full((len(path), len(path)), float("-inf")).triu(1)
        return mask

    def _shared(self, path: Int[Tensor, " nodes"], token_ids: Int[Tensor, " tokens"]) -> Int[Tensor, " shared"]:
        length = min(len(path), len(token_ids))
        same = (self.token_ids[path[:length]] == token_ids[:length]).int().cumprod(0)
        return path[: int(same.sum())]


def _joined(laws: Sequence[EventLaw]) -> EventLaw:
    width = max(law.rows.shape[1] for law in laws)
    wide = [_widened(law, width) for law in laws]
    return EventLaw(
        torch.cat([law.rows for law in wide]),
        torch.cat([law.probs for law in wide]),
        torch.cat([law.emitted for law in wide]),
    )


def _widened(law: EventLaw, width: int) -> EventLaw:
    missing = width - law.rows.shape[1]
    if not missing:
        return law
    rows = torch.nn.functional.pad(law.rows, (0, missing), value=UNSAYABLE)
    probs = torch.cat([law.probs[:, :-1], law.probs.new_zeros(len(law), missing), law.probs[:, -1:]], -1)
    return replace(law, rows=rows, probs=probs)
