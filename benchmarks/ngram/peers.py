"""What the suffix drafter is compared with: a dict, transformers' prompt lookup, and Snowflake's suffix tree."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from foredraft.core.proposal import Laws, Proposal

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

Guess = Callable[[Tensor], Proposal]
_DEPTH = 64


def dict_drafter(corpus: Sequence[np.ndarray], vocab_size: int, k: int) -> Guess:
    """Return a drafter from a dict of three tokens to their most frequent successor."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in corpus:
        tokens = text.tolist()
        for first, second, third, following in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
            counts[first, second, third][following] += 1
    best = {context: seen.most_common(1)[0][0] for context, seen in counts.items()}

    def guess(context: Tensor) -> Proposal:
        recent = context[-3:].tolist()
        size = len(recent)
        while len(recent) < size + k and tuple(recent[-3:]) in best:
            recent.append(best[tuple(recent[-3:])])
        return Proposal.certain(torch.tensor(recent[size:], dtype=torch.long), vocab_size)

    return guess


def prompt_lookup(vocab_size: int, k: int) -> Guess:
    """Return transformers' own prompt lookup, which reads the context only."""
    lookup = PromptLookupCandidateGenerator(num_output_tokens=k, max_matching_ngram_size=3, max_length=1 << 30)

    def guess(context: Tensor) -> Proposal:
        candidates, _ = lookup.get_candidates(context[None])
        return Proposal.certain(candidates[0, len(context) :], vocab_size)

    return guess


class SuffixTreePeer:
    """Snowflake's suffix decoding (arXiv 2411.04975): a tree of the corpus, and one of the request, fed apart."""

    def __init__(self, corpus: Sequence[np.ndarray], vocab_size: int, k: int) -> None:
        self._cache = SuffixDecodingCache(_DEPTH)
        for number, text in enumerate(corpus):
            self._cache.start_request(number, text[:1])
            self._cache.add_active_response(number, text)
            self._cache.stop_request(number)
        self._vocab_size, self._k = vocab_size, k
        self._request, self._known = 0, torch.empty(0, dtype=torch.long)

    def guess(self, **options: Any) -> Guess:
        """Return a drafter with options of `speculate`."""

        def guess(context: Tensor) -> Proposal:
            self._follow(context)
            recent = context[-_DEPTH:].numpy().astype(np.int32)
            draft = self._cache.speculate(("text", self._request), recent, max_spec_tokens=self._k, **options)
            token_ids = torch.tensor(draft.token_ids, dtype=torch.long)
            return Proposal(token_ids, Laws.one_hot(len(token_ids), self._vocab_size), tuple(draft.parents))

        return guess

    def _follow(self, context: Tensor) -> None:
        known = len(self._known)
        if known and known <= len(context) and torch.equal(self._known, context[:known]):
            self._cache.add_active_response(("text", self._request), context[known:].numpy().astype(np.int32))
        else:
            if known:
                self._cache.stop_request(("text", self._request))
                self._cache.evict_cached_response(("text", self._request))
            self._request += 1
            self._cache.start_request(("text", self._request), context.numpy().astype(np.int32))
        self._known = context
