"""Prompt lookup by the rule of other runtimes, so that their counts can be predicted.

transformers 5.24 (generation/candidate_generator.py) and vLLM 0.32 (v1/spec_decode/ngram_proposer.py) copy after the
earliest occurrence of the longest suffix that occurs before; foredraft's own lookup copies after the latest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from foredraft.core.errors import CapabilityError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs


@dataclass(frozen=True, slots=True)
class EarliestLookup:
    """Copies what followed the earliest occurrence of the longest suffix of `min_match` to `max_match` tokens."""

    vocab_size: int
    max_match: int = 3
    min_match: int = 1
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    num_bytes: int = 0
    kind: str = "earliest-lookup"

    def bind(self, law: SamplingLaw) -> "EarliestLookup":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens = context.numpy()
        for length in range(min(self.max_match, len(tokens) - 1), self.min_match - 1, -1):
            before = sliding_window_view(tokens[:-1], length)
            found = np.flatnonzero((before == tokens[len(tokens) - length :]).all(1))
            if len(found):
                start = int(found[0]) + length
                return Proposal.certain(context[start : start + k].clone(), self.vocab_size)
        return Proposal.empty(self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        raise CapabilityError("Lookups of other runtimes are decoded with, not replayed: score prompt-lookup instead.")
