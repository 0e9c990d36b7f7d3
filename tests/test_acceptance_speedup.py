"""The formulas of MATHS 6, against its worked examples and against plain search."""

import pytest

from foredraft.acceptance.cost import Costs, Seconds
from foredraft.core.speedup import (
    accepted_moments,
    best_length,
    best_length_marginal,
    break_even_acceptance,
    cascade_speedup,
    expected_accepted_decaying,
    expected_speedup,
    expected_tokens_per_call,
    tokens_per_call_by_position,
)


def test_exercise_one_counts_the_bonus_token() -> None:
    assert expected_tokens_per_call(0.8, 4) == pytest.approx(3.3616)
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(2.40, abs=0.005)


@pytest.mark.parametrize(
    ("acceptance", "cost_ratio", "length", "speedup"),
    [(0.7, 0.1, 4, 1.98), (0.8, 0.1, 6, 2.47), (0.9, 0.05, 13, 4.67), (0.95, 0.02, 31, 9.95)],
)
def test_best_lengths_of_the_table(acceptance: float, cost_ratio: float, length: int, speedup: float) -> None:
    assert best_length(acceptance, cost_ratio) == length
    assert expected_speedup(acceptance, length, cost_ratio) == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize("overhead", [0.0, 0.2])
@pytest.mark.parametrize(("acceptance", "cost_ratio"), [(0.3, 0.05), (0.3, 0.4), (0.6, 0.05), (0.9, 0.1), (0.9, 0.3)])
def test_best_lengths_equal_a_search(acceptance: float, cost_ratio: float, overhead: float) -> None:
    speedups = [expected_speedup(acceptance, k, cost_ratio, overhead if k else 0.0) for k in range(20)]
    searched = speedups.index(max(speedups))
    assert best_length(acceptance, cost_ratio, overhead) == searched
    flat = best_length_marginal([acceptance] * 20, cost_ratio, lambda width: 1.0)
    no_overhead = [expected_speedup(acceptance, k, cost_ratio) for k in range(20)]
    assert flat == no_overhead.index(max(no_overhead))


def test_speculation_pays_only_if_acceptance_exceeds_the_cost_ratio() -> None:
    assert best_length(0.31, 0.3) > 0
    assert best_length(0.29, 0.3) == 0


def test_the_marginal_rule_follows_decay_and_a_growing_target_step() -> None:
    decaying = [0.9 * 0.8**i for i in range(12)]

    def speedup(k: int) -> float:
        return tokens_per_call_by_position(decaying[:k]) / (k * 0.05 + 1 + 0.04 * k)

    searched = max(range(13), key=speedup)
    assert best_length_marginal(decaying, 0.05, lambda width: 1 + 0.04 * (width - 1)) == searched
    assert best_length_marginal(decaying, 0.05, lambda width: 1.0) > searched


def test_moments_of_the_accepted_length_equal_enumeration() -> None:
    chances = [0.7**n * 0.3 for n in range(4)] + [0.7**4]
    assert accepted_moments(0.7, 4) == pytest.approx(
        (sum(n * p for n, p in enumerate(chances)), sum(n * n * p for n, p in enumerate(chances)))
    )
    by_position = tokens_per_call_by_position([0.9 * 0.8**i for i in range(4)])
    assert 1 + expected_accepted_decaying(0.9, 0.8, 4) == pytest.approx(by_position)


def test_break_even_is_where_the_speedup_is_one() -> None:
    acceptance = break_even_acceptance(4, 1.6)
    assert expected_tokens_per_call(acceptance, 4) == pytest.approx(1.6)
    assert break_even_acceptance(2, 3.5) == 1.0


def test_a_faster_draft_is_never_a_product_of_speedups() -> None:
    assert cascade_speedup(3.0, 4, 0.2, 2.0) == pytest.approx(3.0 / 1.4)
    assert cascade_speedup(3.0, 4, 0.2, 2.0) < 2.0 * cascade_speedup(3.0, 4, 0.2, 1.0)


def costs(*target: float, block: dict[int, float]) -> Costs:
    def seconds(value: float) -> Seconds:
        return Seconds(value, value, value)

    return Costs(tuple(map(seconds, target)), {"draft": {k: seconds(value) for k, value in block.items()}})


def test_a_predicted_speedup_uses_the_measured_target_step() -> None:
    measured = costs(0.1, 0.11, 0.12, 0.13, 0.14, block={1: 0.01, 4: 0.04})
    assert measured.draft_seconds("draft", 2) == pytest.approx(0.02)
    assert measured.cost_ratio("draft") == pytest.approx(0.1)
    assert measured.predicted_speedup("draft", 4, 3.3616) == pytest.approx(3.3616 * 0.1 / (0.04 + 0.14))
    assert expected_tokens_per_call(measured.break_even("draft", 4), 4) == pytest.approx(1.8)
    assert Costs.from_json(measured.to_json()) == measured


def test_a_block_without_a_guess_costs_a_plain_step() -> None:
    measured = costs(0.1, 0.15, 0.2, block={1: 0.0, 2: 0.0})
    assert measured.predicted_speedup("draft", 2, 1.0, guess_share=0.0) == pytest.approx(1.0)
    assert measured.predicted_speedup("draft", 2, 1.5, guess_share=0.5) == pytest.approx(1.0)
