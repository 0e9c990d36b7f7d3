"""What everything pluggable must offer. A class is one of these protocols or final."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.law import SamplingLaw
from foredraft.core.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Answer:
    """Text that the target wrote: a prompt followed by the tokens under test.

    Attributes:
        token_ids: Prompt and answer.
        start: Index of the first answer token; >= 1, since a first token has no context.
    """

    token_ids: Int[Tensor, " tokens"]
    start: int

    @property
    def num_tokens(self) -> int:
        """Number of answer tokens."""
        return len(self.token_ids) - self.start


@dataclass(frozen=True, slots=True)
class EmittedProbs:
    """What a drafter gave to the tokens that the target emitted.

    Either by position, where it does not matter where the block started ([answer]), or by block
    start t and offset i ([answer, k]; entry (t, i) is about answer token t + i; entries past the
    end hold 0 and False).

    Attributes:
        probs: draft(x) under the drafter's own law, in [0, 1]; 0 where there is no guess.
        guessed: False where the drafter had no guess: the block ends there, not examined.
    """

    probs: Float[Tensor, "..."]
    guessed: Bool[Tensor, "..."]

    @property
    def by_block_start(self) -> bool:
        return self.probs.dim() == 2


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """What became of one block: the tokens it emitted and how many of them were draft tokens."""

    proposal: Proposal
    emitted: tuple[int, ...]
    num_accepted: int


@runtime_checkable
class Drafter(Protocol):
    """Guesses what the target will say next. Pure given its arguments: caches change speed only."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""

    @property
    def vocab_size(self) -> int:
        """Width of its laws; every proposed id is below it."""

    @property
    def law(self) -> SamplingLaw:
        """The law it draws its own tokens from. Deterministic drafters say GREEDY."""

    @property
    def num_parameters(self) -> int:
        """Weights that one draft step reads; 0 without a model."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds while serving, caches of a request left out."""

    def bind(self, law: SamplingLaw) -> "Drafter":
        """Return the same drafter drawing from `law`, with caches of its own. Deterministic ones ignore it."""

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        """Return at most k draft tokens (chain) that follow `context`; empty for no guess."""

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Return, for each answer, what `propose` would have given to its tokens. No randomness.

        Must equal propose: see tests/contract_drafter.py.
        """


@runtime_checkable
class LawGiver(Protocol):
    """A drafter that can say its whole law at every position of a text, many positions at a time."""

    def laws(self, answers: Sequence[Answer]) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some vocab"]]]:
        """Yield positions, counted over all answers in order, and the law before the token at each of them.

        Positions come in any order, a few hundred at a time; one without a guess does not come. Must equal propose.
        """


@runtime_checkable
class Observer(Protocol):
    """A drafter that learns from what became of its blocks (dynamic caches, the adaptive drafter)."""

    def observe(self, outcome: BlockOutcome) -> None: ...


@runtime_checkable
class LearnsTexts(Protocol):
    """A drafter that learns a text as a whole, once it has ended."""

    def finish(self) -> None:
        """Learn the text whose blocks were observed; nothing if none was."""


@runtime_checkable
class TextReader(Protocol):
    """A drafter that does better where it can read what the tokens say."""

    def reading(self, decode: Callable[[Sequence[int]], str]) -> "Drafter":
        """Return the same drafter, given what makes text of tokens."""


@runtime_checkable
class WeighsMemory(Protocol):
    """A drafter that weighs memory against the target's."""

    def beside(self, target_bytes: int) -> "Drafter":
        """Return the same drafter, given how much memory the target takes."""


EXACT = "exact"
TOKENS_EXACT = "tokens exact, draft steps not"
IN_ORDER = "exact in the order of arrival"
CONTROLLED = "exact at the longest draft length where guesses are certain, else one draw"


@runtime_checkable
class StatesValidity(Protocol):
    """A drafter whose replay is not exact in every respect (MATHS 4); others are exact."""

    @property
    def validity(self) -> str:
        """TOKENS_EXACT where tokens per call are exact, and the draft steps that they cost are not.

        IN_ORDER where what is drafted for one prompt depends on the prompts before it. CONTROLLED where the drafter
        and the length of each block follow from past blocks.
        """


def validity_of(drafter: Drafter) -> str:
    """Return what a drafter states of its replay, EXACT where it states nothing."""
    return drafter.validity if isinstance(drafter, StatesValidity) else EXACT


@runtime_checkable
class Branching(Protocol):
    """A drafter of trees."""

    def num_nodes(self, k: int) -> int:
        """Return the most draft tokens of a block of k levels."""


@runtime_checkable
class TreeGrower(Protocol):
    """A drafter that grows trees of its own, from more than the law at each node."""

    def propose_tree(self, context: Int[Tensor, " tokens"], k: int, max_nodes: int) -> Proposal:
        """Return a tree of certain tokens, at most k levels deep, of at most `max_nodes`; empty for no guess."""


@runtime_checkable
class DraftBatch(Protocol):
    """A drafter at work on several texts, known by their numbers from 0 on."""

    def propose(
        self,
        contexts: Mapping[int, Int[Tensor, " _"]],
        ks: Mapping[int, int],
        generators: Sequence[torch.Generator],
    ) -> dict[int, Proposal]:
        """Return for each context what `Drafter.propose` returns with its own k and the generator of its number."""

    def drop(self, number: int) -> None:
        """Forget a text for good."""


@runtime_checkable
class LearningBatch(DraftBatch, Protocol):
    """A drafter at work on several texts that learns from each of them."""

    def learner(self, number: int) -> object:
        """Return who observes the blocks of one text, if it is an Observer."""


@runtime_checkable
class BatchDrafter(Protocol):
    """A drafter that proposes for several texts in one pass."""

    def open_batch(self, num_texts: int) -> DraftBatch: ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """One answer written by a target, with what it said about each token.

    Attributes:
        token_ids: The answer, the stop token included if there was one.
        logprobs: log target(token) under the sampling law (0 for greedy).
        top_ids, top_logprobs: The most probable tokens of the *stored* law, by position.
        tail_mass: Stored law's mass outside top_ids, in [0, 1].
        finish_reason: "stop" or "length".
    """

    token_ids: Int[Tensor, " tokens"]
    logprobs: Float[Tensor, " tokens"]
    top_ids: Int[Tensor, "tokens top"]
    top_logprobs: Float[Tensor, "tokens top"]
    tail_mass: Float[Tensor, " tokens"]
    finish_reason: str


@runtime_checkable
class Speaker(Protocol):
    """Who wrote some text, as far as a drafter must know it: a target, or what a trace says of one."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Digest of the weights and configuration; changes when the target changes."""

    @property
    def dtype(self) -> str:
        """What it computes in, such as float32; "unknown" for a server that does not say."""

    @property
    def vocab_size(self) -> int:
        """Width of its laws (columns of the head, padding rows included)."""

    @property
    def tokenizer_fingerprint(self) -> str: ...


@runtime_checkable
class Target(Speaker, Protocol):
    """The model whose output law must be kept."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that it can read."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens after which an answer ends, as the target's generation_config says."""

    @property
    def tokenizer(self) -> Any: ...

    def write(
        self,
        prompts: Sequence[Int[Tensor, " tokens"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:
        """Answer a batch of prompts, one seed each; the same call gives the same answers."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target says of an answer that was written before.

    Attributes:
        logprobs: log target(token) under the sampling law (0 for greedy). A token outside the law's cut has the
            log-probability that it would have just inside.
        top_ids, top_logprobs, tail_mass: As in Continuation.
        gap: How far the token's logit, over the temperature, lies below the least one that the law leaves: below the
            largest for a greedy law; 0 for tokens that the law can emit.
        mean, variance: Of the log-probability of a token drawn from the stored law, in nats.
    """

    logprobs: Float[Tensor, " tokens"]
    top_ids: Int[Tensor, "tokens top"]
    top_logprobs: Float[Tensor, "tokens top"]
    tail_mass: Float[Tensor, " tokens"]
    gap: Float[Tensor, " tokens"]
    mean: Float[Tensor, " tokens"]
    variance: Float[Tensor, " tokens"]


@runtime_checkable
class ReadingTarget(Protocol):
    """A target that can say what it thinks of text that it does not write."""

    def read(
        self, answers: Sequence[Answer], law: SamplingLaw, top: int, on_tokens: Callable[[int], None]
    ) -> list[Reading]:
        """Return what it says of the tokens of each answer, in order."""
