"""Literal speculative decoding of several prompts at once: one draft step and one target call serve all of them.

Every prompt has its own chance, its own draft length and its own end, so that its answer is the one that `decode`
gives it alone, but for rounding. Answers that end leave the batch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import CapabilityError, NonFiniteError
from foredraft.core.law import SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import BatchDrafter, DraftBatch, Drafter, LearningBatch, LearnsTexts
from foredraft.decoding.length import FixedLength, LengthPolicy
from foredraft.decoding.rules import Rule, verify_chain
from foredraft.decoding.speculative import Decoded, Limits, Writing, observer, uniforms, verified_chain
from foredraft.decoding.witness import Witness


@runtime_checkable
class BatchTargetSession(Protocol):
    """A target that follows several texts, known by their numbers from 0 on."""

    def logits(
        self, texts: Mapping[int, Int[Tensor, " _"]], last: Mapping[int, int]
    ) -> dict[int, Float[Tensor, "_ vocab"]]:
        """Return for each text the logits after each of its last tokens; cuts caches to the common prefix first."""

    def drop(self, number: int) -> None:
        """Forget a text for good."""


def decode_batch(
    session: BatchTargetSession,
    drafter: Drafter,
    prompts: Sequence[Int[Tensor, " _"]],
    law: SamplingLaw,
    k: int | Callable[[], LengthPolicy],
    limits: Limits,
    generators: Sequence[torch.Generator],
    rule: Rule = verify_chain,
    witnesses: Sequence[Witness] = (),
) -> list[Decoded]:
    """Answer several prompts under the target's law, with up to k draft tokens each before each target call.

    Args:
        session: Has room for as many texts as there are prompts.
        k: Draft tokens of a block, or what makes the policy that chooses them for one prompt.
        generators: One for each prompt.
        witnesses: Are shown every block, one for each prompt; empty for none.

    Returns: One answer a prompt; `seconds` run from the start of the batch to the answer's end.

    Raises:
        CapabilityError: the drafter grows trees.
        PromptError, DrafterError, NonFiniteError: as in `decode`.
    """
    start = time.perf_counter()
    writings = [Writing(prompt, limits) for prompt in prompts]
    lengths = [FixedLength(k) if isinstance(k, int) else k() for _ in prompts]
    batch = drafter.open_batch(len(prompts)) if isinstance(drafter, BatchDrafter) else _OneByOne(drafter, len(prompts))
    observers = [observer(length, _learner(batch, number, drafter)) for number, length in enumerate(lengths)]
    chances = [uniforms(generator) for generator in generators]
    decoded: dict[int, Decoded] = {}
    live = list(range(len(prompts)))
    while live:
        texts = {number: writings[number].text for number in live}
        ks = {number: min(lengths[number].next_length(), writings[number].room) for number in live}
        proposals = batch.propose(texts, ks, generators)
        logits = session.logits(*_with_guesses(texts, proposals))
        for number in live:
            writing, proposal = writings[number], proposals[number]
            first, room = len(writing.text), writing.room
            try:
                verdict = verified_chain(logits[number], first, proposal, room, law, chances[number], rule)
            except NonFiniteError as error:
                raise NonFiniteError(f"Prompt {number} of the batch: {error}") from error
            writing.take(proposal, verdict, observers[number])
            if witnesses:
                witnesses[number].see(logits[number], proposal, verdict, writing.last_block)
        for number in [number for number in live if writings[number].is_done]:
            decoded[number] = writings[number].decoded(time.perf_counter() - start)
            live.remove(number)
            session.drop(number)
            batch.drop(number)
    return [decoded[number] for number in range(len(prompts))]


def _with_guesses(
    texts: Mapping[int, Int[Tensor, " _"]], proposals: Mapping[int, Proposal]
) -> tuple[dict[int, Tensor], dict[int, int]]:
    """Return what the target reads of each text, and how many of its last positions it is asked about."""
    for proposal in proposals.values():
        if not proposal.is_chain:
            raise CapabilityError("Trees are decoded one prompt at a time: ask for a batch of 1, or for chains.")
    longer = {number: torch.cat([text, proposals[number].token_ids.to(text)]) for number, text in texts.items()}
    return longer, {number: len(proposals[number]) + 1 for number in texts}


@final
class _OneByOne:
    """A drafter that proposes for one text at a time, once for each text."""

    def __init__(self, drafter: Drafter, num_texts: int) -> None:
        self.drafters = [drafter.bind(drafter.law) for _ in range(num_texts)]

    def propose(
        self,
        contexts: Mapping[int, Int[Tensor, " _"]],
        ks: Mapping[int, int],
        generators: Sequence[torch.Generator],
    ) -> dict[int, Proposal]:
        return {
            number: self.drafters[number].propose(context, ks[number], generators[number])
            if ks[number]
            else Proposal.empty(self.drafters[number].vocab_size)
            for number, context in contexts.items()
        }

    def drop(self, number: int) -> None:
        drafter = self.drafters[number]
        if isinstance(drafter, LearnsTexts):
            drafter.finish()

    def learner(self, number: int) -> Drafter:
        return self.drafters[number]


def _learner(batch: DraftBatch, number: int, drafter: Drafter) -> object:
    """Return who learns what became of the blocks of one text, if anyone does."""
    return batch.learner(number) if isinstance(batch, LearningBatch) else drafter
