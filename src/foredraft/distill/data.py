"""What a training step reads: answers and general text, in what order, and the target's law at each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import TraceError
from foredraft.core.law import SamplingLaw
from foredraft.distill.losses import UNSAYABLE, EventLaw
from foredraft.models.head import NO_IDS
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace


@dataclass(frozen=True, slots=True)
class Example:
    """Text behind a context, and the law under which the target's probabilities are taught at its tokens.

    Attributes:
        row: The context as its prompt, the text as its answer.
        temperature, top_k, top_p: Of that law; the one that the trace stored.
        is_targets: Whether the target wrote the text. Where it did not, its most probable token counts as emitted.
        scored: Positions of the answer that are trained on, repeats included; empty for each of them once.
        is_live: Whether the target's law is not taken from the row and must be asked for.
    """

    row: TraceRow
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    is_targets: bool = True
    scored: Int[Tensor, " scored"] = NO_IDS
    is_live: bool = False

    @staticmethod
    def under(law: SamplingLaw, row: TraceRow, is_targets: bool = True, is_live: bool = False) -> "Example":
        return Example(row, law.temperature, law.top_k, law.top_p, is_targets, is_live=is_live)

    @property
    def law(self) -> SamplingLaw:
        return SamplingLaw(self.temperature, self.top_k, self.top_p)

    @property
    def positions(self) -> Int[Tensor, " scored"]:
        """Positions of the answer that are trained on."""
        return self.scored if len(self.scored) else torch.arange(len(self.row.answer_ids))


# Answers to one prompt: under several laws, and the turns of one conversation. A window of general text is one alone.
Group = tuple[Example, ...]


def read_groups(traces: Sequence[Trace], stored_laws: bool = True) -> list[Group]:
    """Return the answers of all traces, grouped by prompt, in the order in which prompts first appear.

    Args:
        stored_laws: Read the laws at their tokens too; without them the target is asked live.

    Raises:
        TraceError: there is no answer.
    """
    groups: dict[str, list[Example]] = {}
    for trace in traces:
        for row in trace.rows(tops=stored_laws):
            if len(row.answer_ids):
                groups.setdefault(row.prompt_id, []).append(
                    Example.under(trace.info.stored_law, row, is_live=not stored_laws)
                )
    if not groups:
        raise TraceError(f"There is no answer to learn from in {', '.join(str(trace.path) for trace in traces)}.")
    return [tuple(examples) for examples in groups.values()]


def plan_steps(
    groups: Sequence[Group],
    tokens: int,
    batch_tokens: int,
    seed: int,
    texts: Sequence[Group] = (),
    share: float = 0.0,
) -> list[list[int]]:
    """Return the groups of each training step, texts numbered behind the answers.

    Answers and texts come each in whole permutations, one after another; the next group is one of text wherever
    text has had less than its share of the positions so far. A step ends with the group that brings it to
    `batch_tokens` positions, the last one when `tokens` are reached in all. Depends on nothing but the arguments.
    """
    sizes = [num_positions(group) for group in (*groups, *texts)]
    answers = _Permutations(0, len(groups), seed)
    others = _Permutations(len(groups), len(texts), seed + 1)
    steps: list[list[int]] = []
    step: list[int] = []
    total = filled = of_text = 0
    while total < tokens:
        is_text = bool(texts) and of_text < share * total
        index = next(others if is_text else answers)
        step.append(index)
        filled += sizes[index]
        total += sizes[index]
        of_text += is_text * sizes[index]
        if filled >= batch_tokens or total >= tokens:
            steps.append(step)
            step, filled = [], 0
    return steps


def endless_steps(groups: Sequence[Group], batch_tokens: int, seed: int) -> Iterator[Sequence[Group]]:
    """Yield the groups of step after step without end, each time through in another order."""
    tokens = sum(map(num_positions, groups))
    for own_seed in count(seed + 1):
        for step in plan_steps(groups, tokens, batch_tokens, own_seed):
            yield [groups[index] for index in step]


@final
class _Permutations:
    """Numbers from `first` on in an endless row of permutations."""

    def __init__(self, first: int, count: int, seed: int) -> None:
        self._first = first
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._left: Iterator[int] = iter(())

    def __next__(self) -> int:
        index = next(self._left, None)
        if index is None:
            self._left = iter(torch.randperm(self._count, generator=self._generator).tolist())
            index = next(self._left)
        return self._first + index


def num_positions(group: Group) -> int:
    """Return the number of positions of a group that are trained on."""
    return sum(len(example.scored) or len(example.row.answer_ids) for example in group)


def trained_law(example: Example, row_of_token: Int[Tensor, " vocab"]) -> EventLaw:
    """Return the stored law at the positions that are trained on; see `event_law`.

    Where it must be asked for, its only event is "some token".
    """
    if example.is_live:
        count = len(example.positions)
        return EventLaw(torch.empty(count, 0, dtype=torch.long), torch.ones(count, 1), NO_IDS.new_zeros(count))
    law = event_law(example.row, row_of_token, example.is_targets)
    if not len(example.scored):
        return law
    return EventLaw(law.rows[example.scored], law.probs[example.scored], law.emitted[example.scored])


def event_law(row: TraceRow, row_of_token: Int[Tensor, " vocab"], is_targets: bool = True) -> EventLaw:
    """Return the stored law at each answer token over the rows of a draft's head.

    An emitted token that is not among the stored ones takes the place of the least probable of them,
    whose mass goes to the tail. Where none is stored it is the only event. In text that is not the target's, its most
    probable token counts as emitted.
    """
    if not row.top_ids.shape[1]:
        probs = row.logprobs.exp()
        events = torch.stack([probs, (1.0 - probs).clamp(min=0.0)], -1)
        return EventLaw(row_of_token[row.answer_ids][:, None], events, torch.zeros_like(row.answer_ids))
    token_ids, probs, tail = row.top_ids.long(), row.top_logprobs.float().exp(), row.tail_mass.clone()
    if not is_targets:
        return EventLaw(row_of_token[token_ids], torch.cat([probs, tail[:, None]], -1), probs.argmax(-1))
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
