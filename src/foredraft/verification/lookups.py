"""Prompt lookup by the rule of other runtimes, so that their counts can be predicted.

Each rule is that of the version named; foredraft's own lookup copies after the latest occurrence of the longest suffix.
ONNX Runtime GenAI 0.18 (n_gram_lookup.h) does the same with one length of suffix, and needs no rule here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from foredraft.core.errors import CapabilityError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, Drafter, EmittedProbs
from foredraft.verification.counting import Counting


@dataclass(frozen=True, slots=True)
class Lookup:
    """A runtime's own prompt lookup.

    Attributes:
        counting: How its blocks are counted.
        drafter: Makes what guesses by its rule: from the vocabulary's size, the longest and the shortest suffix that is
            looked for, and the draft length.
        has_shortest: Whether the shortest suffix can be set; else it is one token, or the longest.
    """

    counting: Counting
    drafter: Callable[[int, int, int, int], Drafter]
    has_shortest: bool = False


@dataclass(frozen=True, slots=True)
class EarliestLookup:
    """Copies what followed the earliest occurrence of the longest suffix of `min_match` to `max_match` tokens.

    The rule of transformers 5.24 (generation/candidate_generator.py), of vLLM 0.32 (v1/spec_decode/ngram_proposer.py),
    and with `halves` of OpenVINO GenAI 2026.4 (prompt_lookup/continuous_batching_for_prompt_lookup.cpp).

    Attributes:
        halves: In a context of at most max_match tokens, no suffix longer than half of it is looked for.
    """

    vocab_size: int
    max_match: int = 3
    min_match: int = 1
    halves: bool = False
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    num_bytes: int = 0
    kind: str = "earliest-lookup"

    def bind(self, law: SamplingLaw) -> "EarliestLookup":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens = context.numpy()
        for length in range(self._longest(len(tokens)), self.min_match - 1, -1):
            found = _occurrences(tokens[:-1], tokens[len(tokens) - length :])
            if len(found):
                start = int(found[0]) + length
                return Proposal.certain(context[start : start + k].clone(), self.vocab_size)
        return Proposal.empty(self.vocab_size)

    def _longest(self, num_tokens: int) -> int:
        if self.halves and num_tokens <= self.max_match:
            return num_tokens // 2
        return min(self.max_match, num_tokens - 1)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        raise CapabilityError(_NO_REPLAY)


@dataclass(frozen=True, slots=True)
class NgramSimple:
    """Copies `match` to `longest` tokens that followed the latest occurrence of the last `match` tokens.

    The rule of llama.cpp's ngram-simple (common/ngram-map.cpp, b11434: size_n and size_m). Its history ends before the
    newest token: that one is matched and never copied. The history's first token starts no match, an occurrence that
    ends one token before the newest is none, and nothing is drafted in a history of at most match + longest + 1 tokens.
    """

    vocab_size: int
    match: int
    longest: int
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    num_bytes: int = 0
    kind: str = "ngram-simple"

    def __post_init__(self) -> None:
        if self.match > self.longest:
            raise UserError(
                f"ngram-simple drafts as many tokens as it matches, or more: with max_match={self.match} and "
                f"{self.longest} draft tokens it never drafts. Ask for a shorter match, or give a larger --k."
            )

    def bind(self, law: SamplingLaw) -> "NgramSimple":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens = context.numpy()
        history = len(tokens) - 1
        if history <= self.match + self.longest + 1:
            return Proposal.empty(self.vocab_size)
        found = _occurrences(tokens[1 : history - 1], tokens[len(tokens) - self.match :])
        start = int(found[-1]) + 1 + self.match if len(found) else history
        copied = context[start : min(start + self.longest, history)]
        if len(copied) < self.match:
            return Proposal.empty(self.vocab_size)
        return Proposal.certain(copied[:k].clone(), self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        raise CapabilityError(_NO_REPLAY)


_NO_REPLAY = "Lookups of other runtimes are decoded with, not replayed: score prompt-lookup instead."


def _occurrences(tokens: Int[np.ndarray, " tokens"], part: Int[np.ndarray, " part"]) -> Int[np.ndarray, " found"]:
    """Return where `part` begins in `tokens`, in order; it is not longer than they are."""
    return np.flatnonzero((sliding_window_view(tokens, len(part)) == part).all(1))
