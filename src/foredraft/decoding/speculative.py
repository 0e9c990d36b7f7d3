"""Literal speculative decoding of one prompt with a chain of draft tokens; plain decoding is its case k = 0."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import NonFiniteError, PromptError, UserError
from foredraft.core.law import SamplingLaw, law_probs
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import BlockOutcome, Drafter, Observer
from foredraft.decoding.rules import Uniform, check_proposal, verify_chain


@runtime_checkable
class TargetSession(Protocol):
    """A target with a cache that follows the token list it is shown."""

    def logits(self, token_ids: Int[Tensor, " tokens"], last: int) -> Float[Tensor, "last vocab"]:
        """Return the logits at the last `last` positions; cuts its cache to the common prefix first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer ends.

    Attributes:
        max_new_tokens: Longest answer, in tokens.
        stop_ids: Tokens after which it ends; the stop token is part of it.
        max_context: Tokens of prompt and answer together that the target can read.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    max_context: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}.")

    def room(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt.

        Raises:
            PromptError: none may.
        """
        if not 0 < prompt_tokens < self.max_context:
            raise PromptError(
                f"A prompt of {prompt_tokens} tokens cannot be answered: the target reads 1 to {self.max_context}"
                f" tokens of prompt and answer together."
            )
        return min(self.max_new_tokens, self.max_context - prompt_tokens)

    def kept(self, emitted: list[int], room: int) -> int:
        """Return how many of a block's tokens belong to the answer."""
        ends = (index + 1 for index, token_id in enumerate(emitted) if token_id in self.stop_ids)
        return min(next(ends, len(emitted)), room)


@dataclass(frozen=True, slots=True)
class BlockCount:
    """One target call: draft tokens offered, tested, accepted, and tokens that joined the answer.

    What lies behind the answer's end is not counted, so that the counts mean what replay's mean.
    """

    drafted: int
    examined: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer and what it took to write it."""

    token_ids: Int[Tensor, " tokens"]
    blocks: tuple[BlockCount, ...]
    seconds: float
    finish_reason: str

    @property
    def target_calls(self) -> int:
        return len(self.blocks)

    @property
    def drafted(self) -> int:
        return sum(block.drafted for block in self.blocks)

    @property
    def accepted(self) -> int:
        return sum(block.accepted for block in self.blocks)

    @property
    def mean_tokens_per_call(self) -> float:
        """Tokens emitted / target calls, bonus tokens included."""
        return len(self.token_ids) / len(self.blocks)


def decode(
    session: TargetSession,
    drafter: Drafter,
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    k: int,
    limits: Limits,
    generator: torch.Generator,
) -> Decoded:
    """Answer one prompt under the target's law, with up to k draft tokens before each target call.

    The drafter draws from its own law; its cache and the session's are cut back to the kept tokens.

    Raises:
        DrafterError: the drafter broke its contract.
        NonFiniteError: the target gave NaN or infinite logits.
    """
    propose = partial(_propose, drafter, k, generator)
    observe = drafter.observe if isinstance(drafter, Observer) else _ignore
    return _decode(session, propose, observe, prompt_ids, law, limits, uniforms(generator))


def plain_decode(
    session: TargetSession,
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    limits: Limits,
    generator: torch.Generator,
) -> Decoded:
    """Answer one prompt without drafting, in the same engine as `decode`."""
    return _decode(session, _no_guess, _ignore, prompt_ids, law, limits, uniforms(generator))


def uniforms(generator: torch.Generator) -> Uniform:
    """Return a source of fresh uniforms in [0, 1)."""
    return partial(_uniform, generator)


def _decode(
    session: TargetSession,
    propose: Callable[[Int[Tensor, " tokens"], int], Proposal],
    observe: Callable[[BlockOutcome], None],
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    limits: Limits,
    uniform: Uniform,
) -> Decoded:
    start = time.perf_counter()
    context, room, blocks = prompt_ids, limits.room(len(prompt_ids)), []
    answer: list[int] = []
    stopped = False
    while len(answer) < room and not stopped:
        proposal = propose(context, room - len(answer))
        logits = session.logits(torch.cat([context, proposal.token_ids.to(context)]), len(proposal) + 1)
        check_logits(logits, len(context))
        check_proposal(proposal, room - len(answer), logits.shape[-1])
        verdict = verify_chain(law_probs(logits, law), proposal, uniform)
        emitted = [*proposal.token_ids[: verdict.num_accepted].tolist(), verdict.next_token]
        emitted = emitted[: limits.kept(emitted, room - len(answer))]
        answer += emitted
        stopped = emitted[-1] in limits.stop_ids
        accepted = min(verdict.num_accepted, len(emitted))
        blocks.append(BlockCount(len(proposal), min(len(proposal), len(emitted)), accepted, len(emitted)))
        observe(BlockOutcome(proposal, tuple(emitted), accepted))
        context = torch.cat([context, torch.tensor(emitted).to(context)])
    seconds = time.perf_counter() - start
    return Decoded(context[len(prompt_ids) :], tuple(blocks), seconds, "stop" if stopped else "length")


def check_logits(logits: Float[Tensor, "positions vocab"], first: int) -> None:
    """Refuse logits that are NaN or infinitely large; -inf marks tokens that cannot come.

    Args:
        logits: Of consecutive positions.
        first: Index in the text of the token that the first row is about.

    Raises:
        NonFiniteError: names the first such position.
    """
    bad = ~torch.isfinite(logits.amax(-1))
    if bool(bad.any()):
        position = first + int(torch.nonzero(bad)[0])
        raise NonFiniteError(
            f"The target gave NaN or infinite logits for token {position} of the text. "
            f"Load it in float32, or check its weights."
        )


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64, device=generator.device))


def _propose(
    drafter: Drafter, k: int, generator: torch.Generator, context: Int[Tensor, " tokens"], room: int
) -> Proposal:
    return drafter.propose(context, min(k, room), generator)


def _no_guess(context: Int[Tensor, " tokens"], room: int) -> Proposal:
    return Proposal.empty(0)


def _ignore(outcome: BlockOutcome) -> None: ...
