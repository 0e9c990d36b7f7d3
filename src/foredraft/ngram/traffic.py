"""The traffic drafter: a suffix drafter whose corpus is what was served lately."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, BlockOutcome, EmittedProbs
from foredraft.ngram.cache import RequestCache
from foredraft.ngram.suffix import SuffixDrafter, Tier, Voting


class TrafficDrafter:
    """Learns a request when the next one begins, so that a request is never matched against itself in the cache.

    What it proposes depends on the order of requests: `replay` takes the answers in the order they arrived and
    learns them.

    Args:
        tiers: Corpora beside the cache, with the weight of each.
        cache_weight: The weight of occurrences in the cache.
    """

    kind: str = "traffic"
    law: SamplingLaw = GREEDY
    num_parameters: int = 0

    def __init__(
        self,
        cache: RequestCache,
        tiers: Sequence[tuple[Tier, float]] = (),
        cache_weight: float = 1.0,
        voting: Voting | None = None,
    ) -> None:
        self.vocab_size = cache.vocab_size
        self._cache = cache
        self._options = (tiers, cache_weight, voting)
        self._drafter = SuffixDrafter(cache.vocab_size, [(cache, cache_weight), *tiers], voting)
        self._context: Int64[np.ndarray, " context"] = np.empty(0, np.int64)
        self._request: Int64[np.ndarray, " request"] = np.empty(0, np.int64)

    @property
    def num_bytes(self) -> int:
        return self._drafter.num_bytes

    def bind(self, law: SamplingLaw) -> "TrafficDrafter":
        """Return a drafter that shares the cache, for another stream of requests."""
        tiers, cache_weight, voting = self._options
        return TrafficDrafter(self._cache, tiers, cache_weight, voting)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        self._context = context.numpy()
        return self._drafter.propose(context, k, generator)

    def observe(self, outcome: BlockOutcome) -> None:
        """Take note of the last block; text that does not go on from the noted request ends that request."""
        request = np.concatenate([self._context, np.array(outcome.emitted, np.int64)])
        known = len(self._request)
        if not np.array_equal(request[:known], self._request):
            self.finish()
        self._request = request

    def finish(self) -> None:
        """Learn the request that was noted; nothing if none was."""
        if len(self._request):
            self._cache.learn(self._request)
            self._request = np.empty(0, np.int64)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        emitted = []
        for answer in answers:
            emitted += self._drafter.replay([answer], k)
            self._cache.learn(answer.token_ids.numpy())
        return emitted
