"""What a training step reads: the answers of traces, in what order, and the target's law at each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import TraceError
from foredraft.distill.losses import UNSAYABLE, EventLaw
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace


@dataclass(frozen=True, slots=True)
class Example:
    """One answer, and the temperature of the law that the trace stored for it."""

    row: TraceRow
    temperature: float


# Answers to one prompt: under several laws, and the turns of one conversation.
Group = tuple[Example, ...]


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


def event_law(row: TraceRow, row_of_token: Int[Tensor, " vocab"]) -> EventLaw:
    """Return the stored law at each answer token over the rows of a draft's head.

    An emitted token that is not among the stored ones takes the place of the least probable of them,
    whose mass goes to the tail. Where none is stored it is the only event.
    """
    if not row.top_ids.shape[1]:
        probs = row.logprobs.exp()
        events = torch.stack([probs, (1.0 - probs).clamp(min=0.0)], -1)
        return EventLaw(row_of_token[row.answer_ids][:, None], events, torch.zeros_like(row.answer_ids))
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
