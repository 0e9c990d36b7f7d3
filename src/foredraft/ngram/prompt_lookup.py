"""Prompt lookup: copies what followed the latest earlier occurrence of the context's last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.ngram.jit import jit, pair_hash

NOWHERE = -1
_EMPTY_SLOT = -1


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Matches the longest suffix of `min_match` to `max_match` tokens inside the context; keeps no state.

    What is copied ends with the context, so a block can be shorter than asked.

    Source: Saxena 2023 (prompt lookup decoding); here the latest occurrence is copied, not the first.
    """

    vocab_size: int
    max_match: int = 3
    min_match: int = 1
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    num_bytes: int = 0
    kind: str = "prompt-lookup"

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise UserError(
                f"prompt-lookup needs 1 <= min_match <= max_match, not {self.min_match} and {self.max_match}."
            )

    def bind(self, law: SamplingLaw) -> "PromptLookup":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        source = _latest_match(context.numpy(), self.max_match, self.min_match)
        if source == NOWHERE or k == 0:
            return Proposal.empty(self.vocab_size)
        return Proposal.certain(context[source : source + k].clone(), self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [self._replay_one(answer, k) for answer in answers]

    def _replay_one(self, answer: Answer, k: int) -> EmittedProbs:
        token_ids = answer.token_ids
        sources = torch.from_numpy(_match_sources(token_ids.numpy(), self.max_match, self.min_match))
        starts = torch.arange(answer.start, len(token_ids))[:, None]
        offsets = torch.arange(k)
        copied_from = sources[starts] + offsets
        emitted = starts + offsets
        guessed = (sources[starts] != NOWHERE) & (copied_from < starts) & (emitted < len(token_ids))
        last = len(token_ids) - 1
        hits = token_ids[copied_from.clamp(0, last)] == token_ids[emitted.clamp(max=last)]
        return EmittedProbs((hits & guessed).float(), guessed)


@jit
def _latest_match(context: np.ndarray, max_match: int, min_match: int) -> int:
    """Return what position follows the latest occurrence of the longest known suffix, or NOWHERE."""
    end = len(context)
    longest, source = min_match - 1, NOWHERE
    for position in range(end - 1, min_match - 1, -1):
        length = 0
        while length < max_match and length < position and context[position - 1 - length] == context[end - 1 - length]:
            length += 1
        if length > longest:
            longest, source = length, position
            if length == max_match:
                break
    return source


@jit
def _match_sources(tokens: np.ndarray, max_match: int, min_match: int) -> Int64[np.ndarray, " tokens"]:
    """Return `_latest_match` of every prefix: entry n is about tokens[:n].

    An n-gram's number is the slot of (number of the same without its oldest token, oldest token)
    in a hash table, so that comparisons are exact and every length costs one pass.
    """
    size = len(tokens)
    sources = np.full(size, NOWHERE, dtype=np.int64)
    slots = 16
    while slots < 2 * size:
        slots *= 2
    numbers = np.zeros(size, dtype=np.int64)
    for length in range(1, max_match + 1):
        keys = np.full(slots, _EMPTY_SLOT, dtype=np.int64)
        latest = np.empty(slots, dtype=np.int64)
        for end in range(length, size):
            key = (numbers[end] << 32) | tokens[end - length]
            slot = pair_hash(numbers[end], tokens[end - length]) & (slots - 1)
            while keys[slot] != _EMPTY_SLOT and keys[slot] != key:
                slot = (slot + 1) & (slots - 1)
            if keys[slot] == key:
                if length >= min_match:
                    sources[end] = latest[slot]
            else:
                keys[slot] = key
            latest[slot] = end
            numbers[end] = slot
    return sources
