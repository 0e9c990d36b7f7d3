"""Reports add up over shards, their ratios are those of MATHS 3, and intervals cover what they promise."""

import json
import math

import numpy as np
import pytest

from foredraft.acceptance.intervals import (
    Ratio,
    expected_acceptance,
    interval,
    paired_difference,
    student_quantile,
    tokens_per_call,
)
from foredraft.acceptance.replay import Counts
from foredraft.acceptance.report import AcceptanceReport, PromptCounts
from foredraft.core.errors import UserError


def counts(name: str, domain: str = "chat", tokens: int = 10, scale: float = 1.0) -> PromptCounts:
    calls, examined = np.array([8.0 * scale, 5.0]), np.array([[8.0, 0.0], [5.0, 3.0]])
    return PromptCounts(name, domain, tokens, 6.0, Counts(calls, examined, np.array([[4.0, 0.0], [3.0 * scale, 1.5]])))


def report(*prompts: PromptCounts) -> AcceptanceReport:
    return AcceptanceReport.of((1, 2), prompts)


def figures(one: AcceptanceReport) -> list[dict]:
    return sorted(one.to_json()["prompts"], key=lambda prompt: prompt["prompt_id"])


def test_ratios_are_ratios_of_sums() -> None:
    both = report(counts("a"), counts("b", tokens=30))
    assert both.expected_acceptance == pytest.approx(12 / 40)
    assert both.mean_tokens_per_call(1) == pytest.approx(40 / 16)
    assert both.acceptance_by_position(2) == pytest.approx([6 / 10, 3 / 6])
    assert both.acceptance_rate(2) == pytest.approx(9 / 16)


def test_shards_add_up_in_any_order() -> None:
    whole = report(counts("a"), counts("b", "code", scale=0.5), counts("c", "code"))
    parts = [report(counts("c", "code")), report(counts("a")), report(counts("b", "code", scale=0.5))]
    assert figures(parts[0] + parts[1] + parts[2]) == figures(parts[2] + parts[0] + parts[1]) == figures(whole)


def test_turns_of_one_conversation_become_one_prompt() -> None:
    (both,) = (report(counts("a")) + report(counts("a", tokens=5))).prompts
    assert (both.tokens, both.counts.calls.tolist()) == (15, [16.0, 10.0])
    assert both.counts.accepted.tolist() == [[8.0, 0.0], [6.0, 3.0]]


def test_domains_partition_the_prompts() -> None:
    domains = report(counts("a"), counts("b", "code"), counts("c", "code")).by_domain()
    assert {name: len(part.prompts) for name, part in domains.items()} == {"chat": 1, "code": 2}


def test_reports_of_other_lengths_do_not_add_up() -> None:
    with pytest.raises(UserError, match=r"\(1, 2\) and \(3,\)"):
        report(counts("a")) + AcceptanceReport((3,), ())


def test_a_saved_report_loads_as_it_was() -> None:
    whole = report(counts("a"), counts("ü"))
    data = json.loads(json.dumps(whole.to_json()))
    assert AcceptanceReport.from_json(data).to_json() == whole.to_json()


def test_student_quantiles() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 20: 2.086, 200: 1.972}
    for degrees, wanted in table.items():
        assert student_quantile(0.975, degrees) == pytest.approx(wanted, rel=0.01)
    assert student_quantile(0.995, 7) == pytest.approx(3.499, rel=0.01)


@pytest.mark.parametrize("prompts", [8, 40])
def test_the_bootstrap_covers_the_truth_as_often_as_promised(prompts: int) -> None:
    rng, runs = np.random.default_rng(1), 250
    covered = 0
    for _ in range(runs):
        difficulty = rng.beta(4, 2, prompts)  # the tokens of a prompt share it
        tokens = rng.integers(20, 120, prompts)
        found = interval(Ratio(rng.binomial(tokens, difficulty).astype(float), tokens.astype(float)), rng)
        covered += found.low <= 4 / 6 <= found.high
    assert 0.91 <= covered / runs <= 0.99


def drafters(prompts: int, gain: float, noise: float, seed: int = 2) -> tuple[AcceptanceReport, AcceptanceReport]:
    """Return two drafters scored on the same prompts; the first accepts `gain` more of each prompt's 100 tokens."""
    rng = np.random.default_rng(seed)
    base, none = 100 * rng.beta(4, 2, prompts), Counts(np.array([50.0]), np.zeros((1, 1)), np.zeros((1, 1)))
    one = [PromptCounts(str(i), "", 100, float(base[i] + 100 * gain), none) for i in range(prompts)]
    two = [PromptCounts(str(i), "", 100, float(base[i] + rng.normal(0, 100 * noise)), none) for i in range(prompts)]
    return AcceptanceReport.of([1], one), AcceptanceReport.of([1], two)


def test_pairing_narrows_a_difference() -> None:
    first, second = drafters(60, gain=0.02, noise=0.01)
    rng = np.random.default_rng(0)
    paired, alone = (
        paired_difference(first, second, expected_acceptance, rng),
        interval(expected_acceptance(first), rng),
    )
    assert not paired.is_inside_noise
    assert 10 * (paired.difference.high - paired.difference.low) < alone.high - alone.low
    assert paired_difference(first, first, tokens_per_call(1), rng).is_inside_noise


def test_a_difference_inside_the_noise_says_how_many_prompts_it_needs() -> None:
    noisy = paired_difference(*drafters(60, gain=0.005, noise=0.2), expected_acceptance, np.random.default_rng(0))
    assert noisy.is_inside_noise
    assert noisy.prompts_to_resolve(0.02) == pytest.approx(((1.96 + 0.8416) * 0.2 / 0.02) ** 2, rel=0.3)
    assert math.isinf(noisy.prompts_to_resolve(0.0))
    assert noisy.prompts_to_resolve(0.1) == pytest.approx(32, abs=10)
    rng = np.random.default_rng(0)
    seen = [paired_difference(*drafters(32, 0.1, 0.2, seed), expected_acceptance, rng) for seed in range(60)]
    assert np.mean([not found.is_inside_noise for found in seen]) == pytest.approx(0.8, abs=0.15)


def test_drafters_scored_on_other_prompts_are_not_compared() -> None:
    with pytest.raises(UserError, match="cannot be compared in pairs"):
        paired_difference(report(counts("a")), report(counts("b")), expected_acceptance, np.random.default_rng(0))


def test_one_prompt_leaves_no_width() -> None:
    found = interval(Ratio(np.array([3.0]), np.array([4.0])), np.random.default_rng(0))
    assert (found.value, found.bounds) == (0.75, [0.75, 0.75])


def test_a_seed_gives_the_same_interval() -> None:
    ratio = Ratio(np.arange(9.0), np.full(9, 8.0))
    assert interval(ratio, np.random.default_rng(7)) == interval(ratio, np.random.default_rng(7))
