"""What a report says beside its ranking: differences inside the noise, batches, other machines, criteria."""

import copy
import io

import numpy as np
import pytest
from rich.console import Console

from foredraft.acceptance.cost import Costs, Seconds
from foredraft.acceptance.html import render
from foredraft.acceptance.leaderboard import DrafterFacts, LawScores, build_report, noise_warnings
from foredraft.acceptance.replay import Counts
from foredraft.acceptance.report import AcceptanceReport, PromptCounts
from foredraft.acceptance.terminal import leaderboard_table
from foredraft.choosing import choose_from
from foredraft.core.law import SamplingLaw
from foredraft.core.roofline import PassFacts
from foredraft.scoring import predicted_elsewhere
from foredraft.settings import EvaluateSettings, SelectSettings
from tests.made_up_report import QUICKSTART, made_up_report

FACTS = PassFacts(2e9, 2.5e9, 2e9, 1e5, 1e5, 20, "bfloat16")
TARGET = {
    "name": "t", "fingerprint": "f", "dtype": "bfloat16", "parameters": 10**9, "bytes": 2 * 10**9,
    "passes": {name: getattr(FACTS, name) for name in PassFacts.__slots__},
}  # fmt: skip


def scored(calls_per_prompt: np.ndarray) -> AcceptanceReport:
    """100 tokens of each prompt; k = 1 accepts what spares calls."""
    prompts = [
        PromptCounts(
            f"{index}", "d", 100, 100 - calls, Counts(np.array([calls]), np.array([[calls]]), np.array([[100 - calls]]))
        )
        for index, calls in enumerate(calls_per_prompt)
    ]
    return AcceptanceReport.of([1], prompts)


def report(gain: float, noise: float, prompts: int = 30) -> dict:
    """Two drafters of equal cost on the same prompts: `quick` spares `gain` more calls a prompt than `even`."""
    generator = np.random.default_rng(3)
    base = 60 + 8 * generator.standard_normal(prompts)
    calls = {"even": base, "quick": base - gain + noise * generator.standard_normal(prompts)}
    seconds = Seconds(0.01, 0.01, 0.01)
    blocks = {name: {1: Seconds(0.001, 0.001, 0.001)} for name in calls}
    scores = LawScores(
        SamplingLaw(),
        {name: scored(value) for name, value in calls.items()},
        Costs((seconds, seconds), blocks),
        {},
        {16: Costs((seconds, Seconds(0.03, 0.03, 0.03)), blocks)},
        {"quick": {"expected_acceptance_bounds": [0.4, 0.5], "kl_divergence": [0.3, None], "top10_coverage": 0.9,
                   "kl_infinite_share": 0.1, "frequent_token_accuracy": 0.7, "entropy_ratio": 1.2}},
        {"quick": SamplingLaw(0.6, top_k=20), "even": SamplingLaw()},
    )  # fmt: skip
    facts = {name: DrafterFacts("causal-lm", 10**8, 10**8, passes=FACTS) for name in calls}
    return build_report(TARGET, [scores], facts)


def in_terminal(made: dict) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(leaderboard_table(made))
    return " ".join(console.file.getvalue().split())


def test_a_ranking_inside_the_noise_warns_everywhere_and_says_how_many_prompts_it_needs() -> None:
    made = report(gain=0.3, noise=3.0)
    (pair,) = made["paired"]
    assert pair["metric"] == "predicted_speedup"
    assert pair["inside_noise"]
    assert pair["prompts_needed"] > 30
    sentence = (
        f"inside the noise of 30 prompts; about {pair['prompts_needed']} prompts like these would tell them apart"
    )
    selection = choose_from(made, SelectSettings())
    assert any(sentence in warning for warning in selection["warnings"])
    assert sentence in in_terminal(made)
    page = render({**made, "selection": selection})
    assert sentence in page
    assert f"<td>{pair['prompts_needed']}</td>" in page


def test_a_clear_ranking_warns_of_nothing() -> None:
    made = report(gain=6.0, noise=1.0)
    (pair,) = made["paired"]
    assert (pair["better"], pair["inside_noise"]) == ("quick", False)
    assert pair["prompts_needed"] < 30
    assert choose_from(made, SelectSettings())["warnings"] == []
    assert "inside the noise" not in in_terminal(made)


def test_the_difference_is_that_of_the_two_speedups() -> None:
    made = report(gain=6.0, noise=1.0)
    speedups = {entry["name"]: entry["predicted_speedup"]["1"] for entry in made["laws"][0]["drafters"]}
    (pair,) = made["paired"]
    assert pair["difference"] == pytest.approx(speedups["quick"] - speedups["even"])


def test_only_rankings_of_the_chosen_drafter_concern_a_choice() -> None:
    pair = {
        "law": "T=1", "better": "a", "worse": "b", "metric": "predicted_speedup", "difference": 0.0,
        "inside_noise": True, "prompts": 9, "prompts_needed": None,
    }  # fmt: skip
    assert noise_warnings([pair], "c") == []
    assert "more prompts will not tell them apart" in noise_warnings([pair], "a")[0]
    assert noise_warnings([{**pair, "metric": "expected_acceptance"}]) == []


def test_batches_and_criteria_are_shown_with_the_word_that_they_rank_nothing() -> None:
    made = predicted_elsewhere(report(gain=6.0, noise=1.0), ["h100-sxm"], EvaluateSettings(batch_sizes=[1, 8]))
    page, words = render(made), in_terminal(made)
    for text in ("By batch size", "on h100-sxm", "None of these ranks drafts by itself", "at least 0.300"):
        assert text in page
    assert "draws at T=0.6 top-k=20" in page
    assert "draws at T=1" not in page
    assert "T=1, predicted by batch size" in words
    assert "T=1, predicted on h100-sxm by batch size" in words
    assert "no gain" in words  # 16 requests: verifying three times as dear
    entry = next(entry for entry in made["laws"][0]["drafters"] if entry["name"] == "quick")
    assert entry["batch"]["1"]["best_k"] == 1
    assert entry["batch"]["16"]["best_k"] == 0
    assert set(entry["hardware"]["h100-sxm"]) == {"1", "8"}
    assert entry["criteria"]["memory_fraction"] == pytest.approx(0.05)


def test_one_batch_size_here_and_no_criteria_leave_the_page_as_it_was() -> None:
    made = made_up_report(QUICKSTART[:2])
    alone = copy.deepcopy(made)
    for law in alone["laws"]:
        for entry in law["drafters"]:
            entry["batch"] = {"1": {"predicted_speedup": {"1": 1.2}, "best_k": 1, "break_even_acceptance": {"1": 0.4}}}
            entry["criteria"] = None
    assert render(alone) == render(made)
    assert in_terminal(alone) == in_terminal(made)
