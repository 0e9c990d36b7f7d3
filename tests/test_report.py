"""Reports add up over shards, their ratios are those of MATHS 3, and intervals cover what they promise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.acceptance.intervals import (
    Ratio,
    bootstrap,
    paired_difference,
    prompts_to_resolve,
    quotient,
    student_quantile,
    t_interval,
)
from foredraft.acceptance.report import AcceptanceReport, PromptCounts, load_report, save_report
from foredraft.core.errors import UserError


def counts(name: str, domain: str = "chat", tokens: int = 10, scale: float = 1.0) -> PromptCounts:
    return PromptCounts(
        name, domain, tokens, 6.0 * scale, (8.0 * scale, 5.0), ((8.0,), (5.0, 3.0)), ((4.0,), (3.0 * scale, 1.5))
    )


def report(*prompts: PromptCounts) -> AcceptanceReport:
    return AcceptanceReport((1, 2), prompts)


def test_ratios_are_ratios_of_sums() -> None:
    both = report(counts("a"), counts("b", tokens=30))
    assert both.expected_acceptance == pytest.approx(12 / 40)
    assert both.mean_tokens_per_call(1) == pytest.approx(40 / 16)
    assert both.acceptance_by_position(2) == pytest.approx((6 / 10, 3 / 6))
    assert both.acceptance_rate(2) == pytest.approx(9 / 16)
    assert both.guess_share(2) == pytest.approx(1.0)


def test_shards_add_up_in_any_order() -> None:
    whole = report(counts("a"), counts("b", "code", scale=0.5), counts("c", "code"))
    parts = [report(counts("c", "code")), report(counts("a")), report(counts("b", "code", scale=0.5))]
    assert parts[0] + parts[1] + parts[2] == parts[2] + parts[0] + parts[1] == whole


def test_turns_of_one_conversation_become_one_prompt() -> None:
    (both,) = (report(counts("a")) + report(counts("a", tokens=5))).prompts
    assert (both.tokens, both.calls, both.accepted) == (15, (16.0, 10.0), ((8.0,), (6.0, 3.0)))


def test_domains_partition_the_prompts() -> None:
    domains = report(counts("a"), counts("b", "code"), counts("c", "code")).by_domain()
    assert {name: len(part.prompts) for name, part in domains.items()} == {"chat": 1, "code": 2}


def test_reports_of_other_lengths_do_not_add_up() -> None:
    with pytest.raises(UserError, match=r"\[1, 2\] and \[3\]"):
        report(counts("a")) + AcceptanceReport((3,), ())
    with pytest.raises(UserError, match="Draft length 4 was not scored"):
        report(counts("a")).mean_tokens_per_call(4)


def test_an_empty_report_has_figures_of_zero() -> None:
    empty = report()
    assert (empty.expected_acceptance, empty.mean_tokens_per_call(2), empty.acceptance_by_position(2)) == (0, 0, (0, 0))


def test_a_saved_report_loads_as_it_was(tmp_path: Path) -> None:
    whole = report(counts("a"), counts("ü"))
    save_report(tmp_path / "report.json", whole)
    assert load_report(tmp_path / "report.json") == whole
    (tmp_path / "other.json").write_text('{"schema": 1, "ks": [1]}')
    with pytest.raises(UserError, match="cannot be read as an acceptance report"):
        load_report(tmp_path / "other.json")


def test_student_quantiles() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 20: 2.086, 200: 1.972}
    for degrees, wanted in table.items():
        assert student_quantile(0.975, degrees) == pytest.approx(wanted, rel=0.01)
    assert student_quantile(0.995, 7) == pytest.approx(3.499, rel=0.01)


@pytest.mark.parametrize("prompts", [8, 40])
def test_the_bootstrap_covers_the_truth_as_often_as_promised(prompts: int) -> None:
    rng, generator, runs = np.random.default_rng(1), torch.Generator().manual_seed(1), 250
    covered = 0
    for _ in range(runs):
        difficulty = rng.beta(4, 2, prompts)  # tokens of a prompt share it
        tokens = rng.integers(20, 120, prompts)
        interval = bootstrap(Ratio(rng.binomial(tokens, difficulty).astype(float), tokens.astype(float)), generator)
        covered += interval.low <= 4 / 6 <= interval.high
    assert 0.91 <= covered / runs <= 0.99


def test_pairing_narrows_a_difference() -> None:
    rng, generator = np.random.default_rng(2), torch.Generator().manual_seed(2)
    base, tokens = rng.beta(4, 2, 60), np.full(60, 100.0)
    first, second = Ratio(100 * base + 2, tokens), Ratio(100 * base + rng.normal(0, 1, 60), tokens)
    paired = paired_difference(first, second, generator)
    assert paired.excludes_zero
    assert 10 * paired.half_width < bootstrap(first, generator).half_width
    assert not paired_difference(first, first, generator).excludes_zero


def test_prompts_to_resolve_is_what_a_simulation_needs() -> None:
    rng, ones = np.random.default_rng(3), np.ones(4000)
    needed = prompts_to_resolve(Ratio(0.1 + rng.normal(0, 0.5, 4000), ones), Ratio(np.zeros(4000), ones), 0.1)
    assert needed == pytest.approx(((1.96 + 0.8416) * 0.5 / 0.1) ** 2, rel=0.06)
    found = sum(t_interval(rng.normal(0.1, 0.5, needed)).low > 0 for _ in range(400))
    assert found / 400 == pytest.approx(0.8, abs=0.07)


def test_one_prompt_leaves_the_spread_unknown() -> None:
    interval = bootstrap(Ratio(np.array([3.0]), np.array([4.0])), torch.Generator())
    assert (interval.value, interval.low, interval.high) == (0.75, -np.inf, np.inf)


def test_a_seed_gives_the_same_interval() -> None:
    ratio = Ratio(np.arange(9.0), np.full(9, 8.0), factor=2.0)
    assert bootstrap(ratio, torch.Generator().manual_seed(7)) == bootstrap(ratio, torch.Generator().manual_seed(7))
    assert ratio.value == pytest.approx(1.0)
    assert quotient(ratio, ratio, torch.Generator()).low == pytest.approx(1.0)
