"""Replay equals brute force over accept/reject outcomes, and literal decoding within noise."""

import time
from collections import defaultdict

import numpy as np
import pytest
import torch

from foredraft.acceptance.replay import acceptance_given_text, as_arrays, by_block_start, replay_counts
from foredraft.core.law import SamplingLaw, token_logprobs
from foredraft.core.protocols import Answer, Drafter
from foredraft.decoding.speculative import Limits, decode, plain_decode
from tests.toys import Lookup, MarkovDrafter, MarkovSession


def brute_force(acceptance: np.ndarray, guessed: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Walk every sequence of accept/reject outcomes of one answer, matrix form."""
    length = len(acceptance)
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(k))
    calls = 0.0

    def block(start: int, mass: float) -> None:
        nonlocal calls
        if start >= length or mass == 0.0:
            return
        calls += mass
        test(start, 0, mass)

    def test(start: int, offset: int, mass: float) -> None:
        at = start + offset
        if at >= length:
            return
        if offset == k or not guessed[start, offset]:
            block(at + 1, mass)
            return
        totals["examined"][offset] += mass
        totals["accepted"][offset] += mass * acceptance[start, offset]
        block(at + 1, mass * (1 - acceptance[start, offset]))
        test(start, offset + 1, mass * acceptance[start, offset])

    block(0, 1.0)
    return calls, totals["examined"], totals["accepted"]


@pytest.mark.parametrize("form", ["by position", "by block start"])
@pytest.mark.parametrize("seed", range(4))
def test_the_recursion_equals_brute_force(form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, ks = 9, [1, 2, 3, 5]
    shape = (length,) if form == "by position" else (length, 5)
    acceptance = rng.choice([0.0, 1.0, 0.3, 0.8], size=shape)
    guessed = rng.random(shape) < 0.8
    counts = replay_counts(acceptance, guessed, ks)
    if form == "by position":
        acceptance, guessed = by_block_start(acceptance, 5, 0.0), by_block_start(guessed, 5, False)
    for row, k in enumerate(ks):
        calls, examined, accepted = brute_force(acceptance, guessed, k)
        assert counts.calls[row] == pytest.approx(calls)
        assert counts.examined[row, :k] == pytest.approx(examined)
        assert counts.accepted[row, :k] == pytest.approx(accepted)
        assert not counts.examined[row, k:].any()


def test_certain_acceptance_emits_k_plus_one_tokens_a_call() -> None:
    counts = replay_counts(np.ones(20), np.ones(20, dtype=bool), [1, 3, 4])
    assert counts.calls.tolist() == [10, 5, 4]


def test_no_guess_is_a_plain_step_that_examines_nothing() -> None:
    counts = replay_counts(np.zeros(7), np.zeros(7, dtype=bool), [4])
    assert counts.calls.tolist() == [7]
    assert not counts.examined.any()


def test_acceptance_is_the_clamped_ratio_of_the_laws() -> None:
    probs, target = np.array([0.5, 0.2, 0.0]), np.array([0.25, 0.4, 0.5])
    assert acceptance_given_text(probs, target).tolist() == [1.0, 0.5, 0.0]
    matrix = np.array([[0.5, 0.2], [0.2, 0.0], [0.0, 0.0]])
    assert acceptance_given_text(matrix, target).tolist() == [[1.0, 0.5], [0.5, 0.0], [0.0, 0.0]]


def test_a_hundred_thousand_positions_take_well_under_a_second() -> None:
    rng = np.random.default_rng(0)
    acceptance, guessed = rng.random(100_000), np.ones(100_000, dtype=bool)
    replay_counts(acceptance[:9], guessed[:9], range(1, 9))
    start = time.process_time()
    replay_counts(acceptance, guessed, range(1, 9))
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "law",
    [
        SamplingLaw(),
        SamplingLaw(temperature=0.0),
        pytest.param(SamplingLaw(temperature=0.6, top_k=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["model", "copying"])
def test_replay_equals_literal_decoding_within_noise(law: SamplingLaw, kind: str) -> None:
    generator, k, answers, length = torch.Generator().manual_seed(3), 3, 40, 12
    session = MarkovSession(2 * torch.randn(16, 4, generator=generator), order=2)
    drafters: dict[str, Drafter] = {
        "model": MarkovDrafter(session.table + torch.randn(16, 4, generator=generator), order=2).bind(law),
        "copying": Lookup(4),
    }
    replayed, literal = [], []
    for number in range(answers):
        prompt = torch.tensor([number % 4, number // 4 % 4])
        text = plain_decode(session, prompt, law, Limits(length), generator).token_ids
        answer = Answer(torch.cat([prompt, text]), len(prompt))
        target_probs = token_logprobs(session.logits(answer.token_ids[:-1], length), text, law).exp().double().numpy()
        (emitted,) = drafters[kind].replay([answer], k)
        probs, guessed = as_arrays(emitted)
        counts = replay_counts(acceptance_given_text(probs, target_probs), guessed, [k])
        replayed.append([counts.calls[0], *counts.examined[0], *counts.accepted[0]])
        blocks = decode(session, drafters[kind], prompt, law, k, Limits(length), generator).blocks
        examined = [sum(block.examined > i for block in blocks) for i in range(k)]
        literal.append([len(blocks), *examined, *(sum(block.accepted > i for block in blocks) for i in range(k))])
    difference = np.array(replayed) - np.array(literal)
    noise = difference.std(0, ddof=1) / np.sqrt(answers)
    assert np.all(np.abs(difference.mean(0)) <= 4 * noise + 1e-9)
