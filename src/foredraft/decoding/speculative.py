"""Literal speculative decoding of one prompt with chains or trees of draft tokens; plain decoding is its case k = 0."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import CapabilityError, NonFiniteError, PromptError, UserError
from foredraft.core.law import SamplingLaw, law_probs
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import BlockOutcome, Drafter, Observer
from foredraft.decoding.length import FixedLength, LengthPolicy
from foredraft.decoding.rules import Rule, Uniform, check_proposal, verify_chain
from foredraft.decoding.trees import TreeVerdict, verify_tree
from foredraft.decoding.witness import BLIND, Witness

_CONTEXT_TOKENS = 4  # decoders look a little to the left


@runtime_checkable
class TargetSession(Protocol):
    """A target with a cache that follows the token list it is shown."""

    def logits(self, token_ids: Int[Tensor, " tokens"], last: int) -> Float[Tensor, "last vocab"]:
        """Return the logits at the last `last` positions; cuts its cache to the common prefix first."""


@runtime_checkable
class TreeSession(TargetSession, Protocol):
    """A target session that reads trees."""

    def tree_logits(
        self, token_ids: Int[Tensor, " tokens"], nodes: Int[Tensor, " nodes"], parents: tuple[int, ...]
    ) -> Float[Tensor, "positions vocab"]:
        """Return the logits after the text (row 0) and after each node of a tree behind it (row i + 1)."""

    def keep(self, path: tuple[int, ...]) -> None:
        """Make one path of the tree read last part of the text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer ends.

    Attributes:
        max_new_tokens: Longest answer, in tokens.
        stop_ids: Tokens after which it ends; the stop token is part of it.
        max_context: Tokens of prompt and answer together that the target can read.
        stop_strings: Texts after which it ends; the token that completes one is part of it.
        text_of: Decodes tokens, for stop_strings.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    max_context: int = 1 << 30
    stop_strings: tuple[str, ...] = ()
    text_of: Callable[[list[int]], str] = str

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

    def kept(self, answer: list[int], emitted: list[int], room: int) -> tuple[int, bool]:
        """Return how many of a block's tokens belong to the answer, and whether it ends with them."""
        for index, token_id in enumerate(emitted[:room]):
            if token_id in self.stop_ids or self._completes([*answer, *emitted[: index + 1]]):
                return index + 1, True
        return min(len(emitted), room), False

    def _completes(self, answer: list[int]) -> bool:
        if not self.stop_strings:
            return False
        # Each token adds at least one byte, so that a stop string spans at most this many tokens.
        longest = max(len(text.encode()) for text in self.stop_strings)
        text = self.text_of(answer[-longest - _CONTEXT_TOKENS :])
        return any(stop in text for stop in self.stop_strings)


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


@final
class Writing:
    """One answer in the making.

    Attributes:
        text: The prompt and what was kept so far.
        room: Tokens that may still follow.
    """

    def __init__(self, prompt_ids: Int[Tensor, " tokens"], limits: Limits) -> None:
        """Start an answer.

        Raises:
            PromptError: the prompt is empty, or leaves no room.
        """
        self.text = prompt_ids
        self.room = limits.room(len(prompt_ids))
        self._limits = limits
        self._prompt_tokens = len(prompt_ids)
        self._answer: list[int] = []
        self._blocks: list[BlockCount] = []
        self._stopped = False

    @property
    def is_done(self) -> bool:
        return self._stopped or self.room == 0

    @property
    def last_block(self) -> Int[Tensor, " tokens"]:
        """The tokens that the last block added."""
        return self.text[len(self.text) - self._blocks[-1].emitted :]

    def take(
        self, proposal: Proposal, verdict: TreeVerdict, observe: Callable[[BlockOutcome, BlockCount], None]
    ) -> None:
        """Keep what a block emitted, up to where the answer ends, and let `observe` know."""
        path = list(verdict.path)
        emitted = [*proposal.token_ids[path].tolist(), verdict.next_token]
        count, self._stopped = self._limits.kept(self._answer, emitted, self.room)
        emitted = emitted[:count]
        self._answer += emitted
        self.room -= count
        self._blocks.append(BlockCount(len(proposal), min(verdict.examined, count), min(len(path), count), count))
        observe(BlockOutcome(proposal, tuple(emitted), self._blocks[-1].accepted), self._blocks[-1])
        self.text = torch.cat([self.text, torch.tensor(emitted).to(self.text)])

    def decoded(self, seconds: float) -> Decoded:
        """Return the finished answer."""
        reason = "stop" if self._stopped else "length"
        return Decoded(self.text[self._prompt_tokens :], tuple(self._blocks), seconds, reason)


def decode(
    session: TargetSession,
    drafter: Drafter,
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    k: int | LengthPolicy,
    limits: Limits,
    generator: torch.Generator,
    rule: Rule = verify_chain,
    witness: Witness = BLIND,
) -> Decoded:
    """Answer one prompt under the target's law, with up to k draft tokens before each target call.

    The drafter draws from its own law; its cache and the session's are cut back to the kept tokens.

    Args:
        k: Draft tokens of a block (levels of a tree), or what chooses them from block to block.
        rule: Tests chains; trees have theirs.
        witness: Is shown every block.

    Raises:
        DrafterError: the drafter broke its contract.
        NonFiniteError: the target gave NaN or infinite logits.
        CapabilityError: the drafter grows trees, and the session does not read them.
    """
    length = FixedLength(k) if isinstance(k, int) else k
    propose = partial(_propose, drafter, length, generator)
    observe, chance = observer(length, drafter), uniforms(generator)
    return _decode(session, propose, observe, prompt_ids, law, limits, chance, rule, witness)


def plain_decode(
    session: TargetSession,
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    limits: Limits,
    generator: torch.Generator,
) -> Decoded:
    """Answer one prompt without drafting, in the same engine as `decode`."""
    return _decode(session, _no_guess, _unobserved, prompt_ids, law, limits, uniforms(generator), verify_chain, BLIND)


def uniforms(generator: torch.Generator) -> Uniform:
    """Return a source of fresh uniforms in [0, 1)."""
    return partial(_uniform, generator)


def _decode(
    session: TargetSession,
    propose: Callable[[Int[Tensor, " tokens"], int], Proposal],
    observe: Callable[[BlockOutcome, BlockCount], None],
    prompt_ids: Int[Tensor, " tokens"],
    law: SamplingLaw,
    limits: Limits,
    uniform: Uniform,
    rule: Rule,
    witness: Witness,
) -> Decoded:
    start, writing = time.perf_counter(), Writing(prompt_ids, limits)
    while not writing.is_done:
        proposal = propose(writing.text, writing.room)
        logits, verdict = _verified(session, writing.text, proposal, writing.room, law, uniform, rule)
        writing.take(proposal, verdict, observe)
        witness.see(logits, proposal, verdict, writing.last_block)
    return writing.decoded(time.perf_counter() - start)


def _verified(
    session: TargetSession,
    context: Int[Tensor, " tokens"],
    proposal: Proposal,
    room: int,
    law: SamplingLaw,
    uniform: Uniform,
    rule: Rule,
) -> tuple[Float[Tensor, "positions vocab"], TreeVerdict]:
    """Return the target's logits around one block, from one call, and the verdict on it."""
    nodes = proposal.token_ids.to(context)
    if proposal.is_chain:
        logits = session.logits(torch.cat([context, nodes]), len(proposal) + 1)
        return logits, verified_chain(logits, len(context), proposal, room, law, uniform, rule)
    if not isinstance(session, TreeSession):
        raise CapabilityError(f"{type(session).__name__} reads no trees: use chains, or a target loaded by foredraft.")
    logits = session.tree_logits(context, nodes, proposal.parents)
    check_logits(logits, len(context))
    check_proposal(proposal, len(proposal), logits.shape[-1])
    walked = verify_tree(law_probs(logits, law), proposal, uniform)
    session.keep(walked.path)
    return logits, walked


def verified_chain(
    logits: Float[Tensor, "positions vocab"],
    first: int,
    proposal: Proposal,
    room: int,
    law: SamplingLaw,
    uniform: Uniform,
    rule: Rule,
) -> TreeVerdict:
    """Return the verdict on a chain from the target's logits before each draft token and after the last.

    Args:
        first: Index in the text of the first draft token.
        room: Most draft tokens that the block may have.
    """
    check_logits(logits, first)
    check_proposal(proposal, room, logits.shape[-1])
    verdict = rule(law_probs(logits, law), proposal, uniform)
    accepted = verdict.num_accepted
    return TreeVerdict(tuple(range(accepted)), verdict.next_token, min(len(proposal), accepted + 1))


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
    drafter: Drafter, length: LengthPolicy, generator: torch.Generator, context: Int[Tensor, " tokens"], room: int
) -> Proposal:
    k = min(length.next_length(), room)
    return drafter.propose(context, k, generator) if k else Proposal.empty(drafter.vocab_size)


def observer(length: LengthPolicy, drafter: object) -> Callable[[BlockOutcome, BlockCount], None]:
    """Return what tells a length policy, and a drafter that learns, what became of a block."""
    return partial(_observe, length, drafter.observe if isinstance(drafter, Observer) else _ignore)


def _observe(
    length: LengthPolicy, observe: Callable[[BlockOutcome], None], outcome: BlockOutcome, block: BlockCount
) -> None:
    length.observe(block.examined, block.accepted)
    observe(outcome)


def _no_guess(context: Int[Tensor, " tokens"], room: int) -> Proposal:
    return Proposal.empty(0)


def _ignore(outcome: BlockOutcome) -> None: ...


def _unobserved(outcome: BlockOutcome, block: BlockCount) -> None: ...
