"""What the engine itself costs: the block loop beyond drafting, the target's pass and the test of its tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.decoding.rules import verify_chain
from foredraft.decoding.speculative import Limits, decode, plain_decode, uniforms

_BLOCKS = 16
_WARM_UP = 2
_CONTEXT = 64


def measure_overhead(vocab_size: int, law: SamplingLaw, repeats: int) -> tuple[list[float], list[float]]:
    """Return repeated seconds of the loop itself for a plain step, and for a block of one draft token.

    The real loop runs over a target and a drafter that cost nothing; testing the same tokens by hand is taken off.
    The two are timed in turns. Longer blocks differ in what they draft and verify only.
    """
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    context = torch.zeros(_CONTEXT, dtype=torch.long)
    session, drafter = _Ready(logits), _Sure(vocab_size)
    # One token more than blocks keeps room for a draft token in each: nearly every one is rejected.
    limits, guess = Limits(_BLOCKS + 1), Proposal.certain(context[:1], vocab_size)
    plain, block = [], []
    for _ in range(repeats + _WARM_UP):
        generator = torch.Generator().manual_seed(0)
        step = plain_decode(session, context, law, limits, generator)
        plain.append(step.seconds / len(step.blocks) - _testing(logits[:1], law, Proposal.empty(vocab_size)))
        run = decode(session, drafter, context, law, 1, limits, generator)
        block.append(run.seconds / len(run.blocks) - _testing(logits, law, guess))
    return _positive(plain[_WARM_UP:]), _positive(block[_WARM_UP:])


def _positive(seconds: Sequence[float]) -> list[float]:
    """Return the same; a difference of two timings may come out below zero."""
    return [max(0.0, value) for value in seconds]


def _testing(logits: Float[Tensor, "positions vocab"], law: SamplingLaw, guess: Proposal) -> float:
    """Return the seconds of one test, which target steps are timed with."""
    uniform = uniforms(torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for _ in range(_BLOCKS):
        verify_chain(law_probs(logits, law), guess, uniform)
    return (time.perf_counter() - began) / _BLOCKS


@dataclass(frozen=True, slots=True)
class _Ready:
    """A target session that has its answer ready."""

    rows: Float[Tensor, "positions vocab"]

    def logits(self, token_ids: Int[Tensor, " tokens"], last: int) -> Float[Tensor, "last vocab"]:
        return self.rows[:last]


@dataclass(frozen=True, slots=True)
class _Sure:
    """A drafter that always guesses token 0."""

    vocab_size: int
    law: SamplingLaw = GREEDY
    kind: str = "ready"
    num_parameters: int = 0
    num_bytes: int = 0

    def bind(self, law: SamplingLaw) -> "_Sure":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        return Proposal.certain(context[:1], self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [EmittedProbs(one.token_ids[one.start :] == 0, torch.ones(one.num_tokens).bool()) for one in answers]
