"""The traffic drafter: a suffix drafter whose corpus is what was served lately."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import IN_ORDER, Answer, BlockOutcome, EmittedProbs
from foredraft.ngram.cache import LRU, RequestCache
from foredraft.ngram.suffix import SuffixDrafter, Tier, Voting

KIND = "traffic"


class TrafficDrafter:
    """Learns a request when the next one begins, so that a request is never matched against itself in the cache.

    What it proposes depends on the order of requests: `replay` takes the answers in the order in which they arrived,
    and starts from the traffic that it was given at first, so that scoring teaches it nothing.

    Args:
        cache: Traffic to start from; copied, and shared by everything bound from this drafter.
        tiers: Corpora beside the cache, with the weight of each.
        cache_weight: The weight of occurrences in the cache.
    """

    kind: str = KIND
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    validity: str = IN_ORDER

    def __init__(
        self,
        cache: RequestCache,
        tiers: Sequence[tuple[Tier, float]] = (),
        cache_weight: float = 1.0,
        voting: Voting | None = None,
        learned: RequestCache | None = None,
    ) -> None:
        self.vocab_size = cache.vocab_size
        self._start = cache
        self.cache = learned or cache.copy()
        self._options = (tiers, cache_weight, voting)
        self._drafter = _over(self.cache, *self._options)
        self._context: Int64[np.ndarray, " context"] = np.empty(0, np.int64)
        self._request: Int64[np.ndarray, " request"] = np.empty(0, np.int64)

    @property
    def num_bytes(self) -> int:
        return self._drafter.num_bytes

    def bind(self, law: SamplingLaw) -> "TrafficDrafter":
        """Return a drafter that shares the cache, for another stream of requests."""
        return TrafficDrafter(self._start, *self._options, learned=self.cache)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        self._context = context.numpy()
        self._end_unless_it_goes_on(self._context)
        return self._drafter.propose(context, k, generator)

    def observe(self, outcome: BlockOutcome) -> None:
        """Take note of the last block; text that does not go on from the noted request ends that request."""
        request = np.concatenate([self._context, np.array(outcome.emitted, np.int64)])
        self._end_unless_it_goes_on(request)
        # A block of no draft tokens is observed without a proposal: it goes on from here.
        self._request = self._context = request

    def finish(self) -> None:
        """Learn the request that was noted; nothing if none was."""
        if len(self._request):
            self.cache.learn(self._request)
            self._request = np.empty(0, np.int64)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        emitted, cache = [], self._start.copy()
        drafter = _over(cache, *self._options)
        for answer in answers:
            emitted += drafter.replay([answer], k)
            cache.learn(answer.token_ids.numpy())
        return emitted

    def _end_unless_it_goes_on(self, text: Int64[np.ndarray, " text"]) -> None:
        if not np.array_equal(text[: len(self._request)], self._request):
            self.finish()


def traffic_drafter(
    vocab_size: int, capacity: int = 1 << 20, segment: int = 256, policy: str = LRU, file: str = ""
) -> TrafficDrafter:
    """Return a drafter that learns from what it serves, in bounded memory; `file`: a saved cache to start from.

    Raises:
        UserError: no such policy, or no room for two segments.
        CheckpointError: the file is missing, truncated or damaged.
    """
    if file:
        return TrafficDrafter(RequestCache.load(Path(file), vocab_size, ""))
    return TrafficDrafter(RequestCache(vocab_size, capacity, min(segment, capacity // 2), policy))


def _over(
    cache: RequestCache, tiers: Sequence[tuple[Tier, float]], cache_weight: float, voting: Voting | None
) -> SuffixDrafter:
    return SuffixDrafter(cache.vocab_size, [(cache, cache_weight), *tiers], voting)
