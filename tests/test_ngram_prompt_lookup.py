"""Prompt lookup: what it copies, and replay against propose."""

import time

import numpy as np
import pytest
import torch

from foredraft.core.errors import UserError
from foredraft.core.law import GREEDY
from foredraft.core.protocols import Answer, Drafter
from foredraft.ngram.jit import COMPILED
from foredraft.ngram.prompt_lookup import PromptLookup

GENERATOR = torch.Generator()


def brute_force(context: list[int], k: int, max_match: int, min_match: int) -> list[int]:
    for length in range(min(max_match, len(context) - 1), min_match - 1, -1):
        suffix = context[len(context) - length :]
        for end in range(len(context) - 1, length - 1, -1):
            if context[end - length : end] == suffix:
                return context[end : end + k]
    return []


def random_tokens(seed: int, size: int, vocab_size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab_size, size))


@pytest.mark.parametrize(("max_match", "min_match"), [(1, 1), (3, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_it_copies_what_followed_the_latest_longest_match(max_match: int, min_match: int, vocab_size: int) -> None:
    drafter = PromptLookup(vocab_size, max_match, min_match)
    tokens = random_tokens(vocab_size, 70, vocab_size)
    for end in range(1, len(tokens) + 1):
        for k in (0, 1, 4):
            proposal = drafter.propose(tokens[:end], k, GENERATOR)
            assert proposal.token_ids.tolist() == brute_force(tokens[:end].tolist(), k, max_match, min_match)
            assert proposal.is_chain


@pytest.mark.parametrize(("max_match", "min_match"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("vocab_size", [3, 30])
def test_replay_equals_propose(max_match: int, min_match: int, vocab_size: int) -> None:
    drafter = PromptLookup(vocab_size, max_match, min_match)
    tokens = random_tokens(vocab_size, 80, vocab_size)
    for start in (1, 20, 79, 80):
        for k in (1, 3, 8):
            (replayed,) = drafter.replay([Answer(tokens, start)], k)
            assert replayed.by_block_start
            assert replayed.probs.shape == (len(tokens) - start, k)
            for t in range(len(tokens) - start):
                guess = drafter.propose(tokens[: start + t], k, GENERATOR).token_ids.tolist()
                emitted = tokens[start + t : start + t + k].tolist()
                guess = guess[: len(emitted)]
                hits = [float(a == b) for a, b in zip(guess, emitted, strict=False)]
                assert replayed.probs[t].tolist() == hits + [0.0] * (k - len(hits))
                assert replayed.guessed[t].tolist() == [True] * len(guess) + [False] * (k - len(guess))


def test_it_is_a_deterministic_drafter_without_weights() -> None:
    drafter = PromptLookup(100)
    assert isinstance(drafter, Drafter)
    assert (drafter.law, drafter.num_parameters, drafter.num_bytes) == (GREEDY, 0, 0)
    assert drafter.bind(GREEDY) is drafter


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="1 <= min_match <= max_match, not 4 and 3"):
        PromptLookup(100, max_match=3, min_match=4)


@pytest.mark.skipif(not COMPILED, reason="numba is missing or switched off")
def test_a_hundred_thousand_positions_replay_in_about_a_second() -> None:
    tokens = random_tokens(0, 100_000, 49152) % 300
    drafter = PromptLookup(49152)
    drafter.replay([Answer(tokens[:50], 1)], 8)
    begun = time.perf_counter()
    drafter.replay([Answer(tokens, 1)], 8)
    assert time.perf_counter() - begun < 3.0
