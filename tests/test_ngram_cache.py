"""The cross-request cache: what it finds, what it gives up, and the drafter that learns."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.core.errors import CheckpointError, CorpusError, UserError, VocabMismatchError
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, BlockOutcome, Drafter, Observer
from foredraft.ngram.cache import CLUSTER, FREQUENCY, LRU, POLICIES, RequestCache
from foredraft.ngram.traffic import TrafficDrafter

VOCAB = 500
GENERATOR = torch.Generator()


def text(seed: int, size: int = 60, vocab_size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, size)


def found(cache: RequestCache, context: np.ndarray, k: int = 3, limit: int = 8) -> list[tuple[int, list[int]]]:
    lengths, tokens = np.empty(limit, np.int64), np.empty((limit, k), np.int64)
    rows = cache.rows(context.astype(np.int64), lengths, tokens, 0, limit)
    return list(zip(lengths[:rows].tolist(), tokens[:rows].tolist(), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("vocab_size", [4, 500])
def test_every_match_is_real_and_the_longest_come_first(policy: str, vocab_size: int) -> None:
    cache = RequestCache(VOCAB, capacity=400, segment=40, policy=policy)
    requests = [text(seed, 70, vocab_size) for seed in range(12)]
    for request in requests:
        cache.learn(request)
    joined = [request.tolist() for request in requests]
    for context in (text(99, 30, vocab_size), requests[-1][:50], requests[0][:20]):
        matches = found(cache, context)
        assert [length for length, _ in matches] == sorted((length for length, _ in matches), reverse=True)
        for length, following in matches:
            wanted = context[-length:].tolist() + [token for token in following if token >= 0]
            assert any(wanted == request[at : at + len(wanted)] for request in joined for at in range(len(request)))


def test_what_was_learned_last_is_found_across_segments() -> None:
    cache = RequestCache(VOCAB, capacity=4096, segment=40)
    request = text(1, 500)
    cache.learn(request)
    for end in range(20, 480, 7):
        length, following = found(cache, request[:end])[0]
        assert length >= 2
        known = [token for token in following if token >= 0]
        assert known == request[end : end + len(known)].tolist()


def test_the_least_recently_useful_goes_first() -> None:
    cache = RequestCache(VOCAB, capacity=160, segment=40, policy=LRU)
    first, second = text(1, 40), text(2, 40)
    for request in (first, second, text(3, 40), text(4, 40), first, text(5, 40)):
        cache.learn(request)
    assert found(cache, first[:20])
    assert not found(cache, second[:20])


def test_the_least_often_useful_goes_first() -> None:
    cache = RequestCache(VOCAB, capacity=240, segment=40, policy=FREQUENCY)
    popular = text(1, 40)
    for seed in range(2, 12):
        cache.learn(popular)
        cache.learn(text(seed, 40))
    assert found(cache, popular[:20])


def test_one_kind_of_traffic_does_not_drive_out_the_others() -> None:
    cache = RequestCache(VOCAB, capacity=400, segment=40, policy=CLUSTER)
    rare, flood = text(1, 40), text(2, 40)
    cache.learn(rare)
    for _ in range(30):
        cache.learn(flood)
    assert found(cache, rare[:20])
    recent = RequestCache(VOCAB, capacity=400, segment=40, policy=LRU)
    recent.learn(rare)
    for _ in range(30):
        recent.learn(flood)
    assert not found(recent, rare[:20])


def test_a_reloaded_cache_goes_on_as_if_never_saved(tmp_path: Path) -> None:
    kept = RequestCache(VOCAB, capacity=400, segment=40)
    for seed in range(8):
        kept.learn(text(seed))
    kept.save(tmp_path / "cache", "v")
    loaded = RequestCache.load(tmp_path / "cache", VOCAB, "v")
    for seed in range(8, 14):
        kept.learn(text(seed))
        loaded.learn(text(seed))
    for seed in range(14):
        assert found(kept, text(seed)[:30]) == found(loaded, text(seed)[:30])
    with pytest.raises(VocabMismatchError, match="built with tokenizer v, the target has w"):
        RequestCache.load(tmp_path / "cache", VOCAB, "w")
    (tmp_path / "cache").write_bytes((tmp_path / "cache").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        RequestCache.load(tmp_path / "cache", VOCAB, "v")


def test_threads_may_learn_and_look_up_at_once() -> None:
    cache = RequestCache(VOCAB, capacity=2000, segment=40)

    def work(seed: int) -> None:
        for step in range(60):
            cache.learn(text(1000 * seed + step))
            found(cache, text(1000 * seed + step)[:30])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = text(7)
    cache.learn(last)
    assert found(cache, last[:30])


def test_bad_input_is_refused_and_nothing_is_learned() -> None:
    cache = RequestCache(VOCAB, capacity=400, segment=40)
    with pytest.raises(CorpusError, match="token 500 at position 2"):
        cache.learn(np.array([1, 2, VOCAB]))
    assert not found(cache, np.array([1, 2]))
    with pytest.raises(UserError, match=r"Unknown eviction policy 'fifo'. Known: lru, frequency, cluster"):
        RequestCache(VOCAB, policy="fifo")
    with pytest.raises(UserError, match="room for two"):
        RequestCache(VOCAB, capacity=50, segment=40)


def test_a_request_is_learned_when_the_next_begins() -> None:
    drafter = TrafficDrafter(RequestCache(VOCAB, capacity=4000, segment=40))
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter, Observer)
    request = torch.from_numpy(text(1, 80))
    nothing = Proposal.empty(VOCAB)
    for end in range(40, 80, 4):
        assert len(drafter.propose(request[:end], 4, GENERATOR)) == 0
        drafter.observe(BlockOutcome(nothing, tuple(request[end : end + 4].tolist()), 0))
    other = torch.from_numpy(text(2, 30))
    drafter.propose(other, 4, GENERATOR)
    assert drafter.propose(request[:50], 4, GENERATOR).token_ids.tolist() == request[50:54].tolist()


def test_a_block_of_no_draft_tokens_goes_on_from_the_one_before() -> None:
    drafter = TrafficDrafter(RequestCache(VOCAB, capacity=4000, segment=40))
    request = torch.from_numpy(text(1, 60))
    drafter.propose(request[:50], 4, GENERATOR)
    for token in request[50:].tolist():
        drafter.observe(BlockOutcome(Proposal.empty(VOCAB), (token,), 0))
    drafter.finish()
    assert drafter.propose(request[:55], 5, GENERATOR).token_ids.tolist() == request[55:].tolist()


def test_replay_learns_in_the_order_of_arrival() -> None:
    drafter = TrafficDrafter(RequestCache(VOCAB, capacity=4000, segment=40))
    request = torch.from_numpy(text(1, 80))
    first, second = drafter.replay([Answer(request, 40), Answer(request, 40)], 4)
    assert float(first.probs.sum()) == 0.0
    assert float(second.probs[:30].mean()) == 1.0
