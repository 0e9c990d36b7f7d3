"""The offline choice over several reports: what belongs together, constraints, front, portfolio and doubt."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from foredraft.acceptance.cost import Costs, Seconds
from foredraft.acceptance.leaderboard import DrafterFacts, LawScores, build_report
from foredraft.acceptance.replay import Counts
from foredraft.acceptance.report import AcceptanceReport, PromptCounts
from foredraft.acceptance.wording import Figure
from foredraft.cascading import with_cascades
from foredraft.choosing import choice_table, choose_among, merged
from foredraft.cli import app
from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw
from foredraft.core.pareto import pareto_front
from foredraft.core.protocols import Answer
from foredraft.core.roofline import PassFacts
from foredraft.select.adaptive import AdaptiveDrafter
from foredraft.select.portfolio import best_portfolio, doubts, over_mix
from foredraft.selection_costs import costs_by_requests
from foredraft.settings import SelectSettings, SimulateSettings
from tests.toys import Lookup

FACTS = PassFacts(2e9, 2e9, 2e9, 1e5, 1e5, 20, "bfloat16")
TARGET = {
    "name": "t", "fingerprint": "f", "dtype": "bfloat16", "parameters": 10**9, "bytes": 2 * 10**9,
    "passes": {name: getattr(FACTS, name) for name in PassFacts.__slots__},
}  # fmt: skip
DOMAINS = ("code", "prose")
ROOMY = SelectSettings(memory_fraction=0.9)


def report(prompts: int = 20, **calls: tuple[float, float]) -> dict[str, Any]:
    """100 tokens a prompt in two domains; each drafter needs the given target calls for them, with some noise."""
    noise = np.random.default_rng(1).normal(0.0, 3.0, prompts)
    seconds = Seconds(0.01, 0.01, 0.01)
    reports = {
        name: AcceptanceReport.of(
            [1], [_counted(index, by_domain[index % 2] + noise[index]) for index in range(prompts)]
        )
        for name, by_domain in calls.items()
    }
    blocks = {name: {1: Seconds(0.001, 0.001, 0.001)} for name in calls}
    slow = Costs((seconds, Seconds(0.03, 0.03, 0.03)), blocks)
    scores = LawScores(SamplingLaw(), reports, Costs((seconds, seconds), blocks), {}, {16: slow})
    passes = PassFacts(2e8, 2e8, 2e8, 1e4, 1e4, 2, "bfloat16")
    facts = {name: DrafterFacts("causal-lm", 10**8, 10**8, passes=passes) for name in calls}
    made = build_report(TARGET, [scores], facts)
    made["laws"][0]["trace"] = "one trace"
    return made


def cascade_report(name: str, ratio: float, tokens: float) -> dict[str, Any]:
    """One drafter of a cost ratio and of so many tokens per call at 4 draft tokens, fewer at 1; verifying is free."""
    step, ks = Seconds(0.01, 0.01, 0.01), [1, 4]
    prompts = [
        PromptCounts(f"{index}", DOMAINS[index % 2], 120, 60.0, Counts(
            np.array([90.0, 120 / tokens]), np.array([[90.0, 0, 0, 0], [120 / tokens] * 4]),
            np.array([[30.0, 0, 0, 0], [30 - 30 / tokens] * 4]),
        ))
        for index in range(8)
    ]  # fmt: skip
    blocks = {name: {k: Seconds(*[0.01 * ratio * k] * 3) for k in ks}}
    scores = LawScores(SamplingLaw(), {name: AcceptanceReport.of(ks, prompts)}, Costs((step,) * 5, blocks), {})
    facts = {name: DrafterFacts("causal-lm", 10**8, 10**8)}
    made = build_report(TARGET, [scores], facts)
    made["laws"][0]["trace"] = "one trace"
    return made


def _counted(index: int, calls: float) -> PromptCounts:
    counts = Counts(np.array([calls]), np.array([[calls]]), np.array([[100 - calls]]))
    return PromptCounts(f"{index}", DOMAINS[index % 2], 100, 100 - calls, counts)


def test_drafters_of_several_reports_stand_in_one_choice() -> None:
    one, other = report(a=(60, 90)), report(b=(90, 60), c=(70, 70))
    chosen = choose_among([one, other], ROOMY)
    assert chosen == choose_among([report(a=(60, 90), b=(90, 60), c=(70, 70))], ROOMY)
    assert chosen["drafter"] == "c"
    assert set(chosen["reasons"]) == {"a", "b"}


def test_batch_sizes_that_one_report_did_not_time_are_left_out() -> None:
    one, other = report(a=(60, 90)), report(b=(90, 60))
    del other["laws"][0]["batch"]["16"], other["laws"][0]["drafters"][0]["batch"]["16"]
    for pair in ([one, other], [other, one]):
        assert {row["batch_size"] for row in choose_among(pair, ROOMY)["figures"]} == {1}
        with pytest.raises(UserError, match="did not time 16 requests together"):
            choose_among(pair, SelectSettings(memory_fraction=0.9, batch_size=16))


def test_two_specialists_beat_the_best_single_drafter() -> None:
    made = report(a=(60, 90), b=(90, 60), c=(70, 70))
    pair = choose_among([made], SelectSettings(memory_fraction=0.9, portfolio=2))["portfolio"]
    assert pair["drafters"] == ["a", "b"]
    assert pair["serves"] == {"code": "a", "prose": "b"}
    single = choose_among([made], ROOMY)["portfolio"]
    assert single["drafters"] == ["c"]
    assert pair["predicted_speedup"] > single["predicted_speedup"] > 1.0
    leaning = choose_among([made], SelectSettings(memory_fraction=0.9, mix={"code": 9.0, "prose": 1.0}))
    assert leaning["portfolio"]["drafters"] == ["a"]
    cramped = choose_among([made], SelectSettings(memory_fraction=0.06, portfolio=2))["portfolio"]
    assert len(cramped["drafters"]) == 1, "two of them take a tenth of the target"


def test_figures_stand_by_law_domain_and_batch_size_with_intervals() -> None:
    made = report(a=(60, 90))
    rows = choose_among([made], ROOMY)["figures"]
    assert {(row["batch_size"], row["domain"]) for row in rows} == {
        (batch, domain) for batch in (1, 16) for domain in ("", *DOMAINS)
    }
    by_place = {(row["batch_size"], row["domain"]): row for row in rows}
    overall = by_place[1, ""]
    assert overall["predicted_speedup"] == pytest.approx(made["laws"][0]["drafters"][0]["predicted_speedup"]["1"])
    low, high = overall["interval"]
    assert low < overall["predicted_speedup"] < high
    assert (
        by_place[1, "code"]["predicted_speedup"] > overall["predicted_speedup"] > by_place[16, ""]["predicted_speedup"]
    )
    table = choice_table(choose_among([made], ROOMY))
    assert "Best portfolio: a" in table
    assert "prose" in table


def test_a_batch_size_has_its_own_choice() -> None:
    made = report(a=(60, 60))
    assert choose_among([made], ROOMY)["drafter"] == "a"
    assert choose_among([made], SelectSettings(memory_fraction=0.9, batch_size=16))["drafter"] == ""
    with pytest.raises(UserError, match="did not time 8 requests together, only 1, 16"):
        choose_among([made], SelectSettings(batch_size=8))


def test_a_report_keeps_what_plain_steps_and_blocks_take_beside_the_models() -> None:
    seconds, beside, beside_plain = (Seconds(one, one, one) for one in (0.01, 0.003, 0.002))
    costs = Costs((seconds, seconds), {"a": {1: Seconds(0.001, 0.001, 0.001)}}, beside, beside_plain)
    counted = AcceptanceReport.of([1], [_counted(index, 60.0) for index in range(4)])
    facts = {"a": DrafterFacts("causal-lm", 10**8, 10**8)}
    made = build_report(TARGET, [LawScores(SamplingLaw(), {"a": counted}, costs, {})], facts)
    answer = Answer(torch.tensor([1, 2, 3]), 1)
    found = costs_by_requests({"a": Lookup(5)}, answer, 1, SimulateSettings(lengths=[1]), made, temperature=1.0)[1]
    assert found.plain == pytest.approx(costs.plain_seconds)
    assert found.drafts[0, 1] + found.target[1] + found.overhead == pytest.approx(costs.block_seconds("a", 1))


def test_a_simulation_goes_by_the_times_of_the_batch_size_that_it_is_asked_for() -> None:
    made, answer, drafters = report(a=(60, 60)), Answer(torch.tensor([1, 2, 3]), 1), {"a": Lookup(5)}
    found = costs_by_requests(drafters, answer, 1, SimulateSettings(lengths=[1], batch_size=16), made)
    assert {requests: one.target[1] for requests, one in found.items()} == {1: 0.01, 16: 0.03}
    with pytest.raises(UserError, match="did not time 8 requests together, only 1, 16"):
        costs_by_requests(drafters, answer, 1, SimulateSettings(lengths=[1], batch_size=8), made)
    unmeasured = SimulateSettings(lengths=[1], batch_size=8, target_seconds=1.0, target_growth=0.1)
    guessed = costs_by_requests(drafters, answer, 1, unmeasured, None)
    assert guessed[1].target.tolist() == pytest.approx([1.0, 1.1])
    assert guessed[8].target.tolist() == pytest.approx([1.7, 2.5])
    assert guessed[8].drafts[0, 1] == pytest.approx(8 * guessed[1].drafts[0, 1])


def test_a_report_says_what_holds_of_a_drafter_that_chooses() -> None:
    counted = AcceptanceReport.of([1], [_counted(index, 60.0) for index in range(4)])
    facts = {"a": DrafterFacts("adaptive", 0, 0, validity=AdaptiveDrafter.validity)}
    made = build_report(TARGET, [LawScores(SamplingLaw(), {"a": counted}, None, {})], facts)
    assert any(note.startswith("a: chooses anew for each block") for note in made["notes"])


def test_the_context_counts_as_memory_of_both() -> None:
    """A draft of 5 % of the weights with a tenth of the keys and values: within 6 % without context, not with."""
    made = report(a=(60, 60))
    assert choose_among([made], SelectSettings(memory_fraction=0.06))["drafter"] == "a"
    longer = choose_among([made], SelectSettings(memory_fraction=0.06, context=20_000))
    assert longer["drafter"] == ""
    assert "The nearest is a" in longer["sentence"]
    assert "with memory_fraction" in longer["sentence"]


def test_bytes_and_vocabulary_are_constraints() -> None:
    made = report(a=(60, 60))
    refused = choose_among([made], SelectSettings(memory_fraction=0.9, max_bytes=99_999_999))
    assert "max_bytes=100000000 it fits, predicted" in refused["sentence"]
    assert choose_among([made], SelectSettings(memory_fraction=0.9, max_bytes=10**8))["drafter"] == "a"
    trimmed = copy.deepcopy(made)
    trimmed["laws"][0]["drafters"][0]["head_rows"] = 8192
    assert choose_among([trimmed], ROOMY)["drafter"] == "a"
    whole = choose_among([trimmed], SelectSettings(memory_fraction=0.9, full_vocabulary=True))
    assert "It can say 8192 tokens only" in whole["reasons"]["a"]


def test_reports_that_do_not_belong_together_are_refused() -> None:
    one = report(a=(60, 90))
    for change, message in (
        (("target", "fingerprint"), "different target: t in the first, t in report 2"),
        (("laws", 0, "temperature"), "different laws"),
        (("laws", 0, "trace"), "different traces: .*one trace.* in the first"),
    ):
        other = copy.deepcopy(report(b=(60, 90)))
        place: Any = other
        for key in change[:-1]:
            place = place[key]
        place[change[-1]] = 0.5
        with pytest.raises(UserError, match=message):
            merged([one, other])
    with pytest.raises(UserError, match="a stands in two reports with other figures"):
        merged([one, report(a=(50, 90))])
    bare = copy.deepcopy(one)
    bare["laws"][0]["drafters"][0]["predicted_speedup"] = None
    with pytest.raises(UserError, match="no costs"):
        choose_among([bare], ROOMY)


def test_absurd_mixes_are_refused() -> None:
    made = report(a=(60, 90))
    for mix, message in (
        ({"poetry": 1.0}, "poetry was not scored. Known: code, prose"),
        ({"code": -1.0}, "share of code is -1.0"),
        ({"code": 0.0}, "no domain has a share above 0"),
        ({"code": 1e308, "prose": 1e308}, "too large to be added up"),
    ):
        with pytest.raises(UserError, match=message):
            choose_among([made], SelectSettings(mix=mix))


def test_more_prompts_settle_what_few_leave_open() -> None:
    few, many = (choose_among([report(prompts, a=(70, 70), b=(70.5, 70.5), c=(85, 85))], ROOMY) for prompts in (8, 600))
    doubt = {one["drafter"]: one for one in few["sensitivity"]}
    assert doubt["b"]["chance"] > 0.2
    assert "could turn the choice to b" in doubt["b"]["sentence"]
    assert doubt["b"]["prompts_needed"] > 8
    assert doubt["c"]["chance"] < 1e-3
    assert "would hardly turn the choice to c" in doubt["c"]["sentence"]
    assert {one["drafter"]: one["chance"] for one in many["sensitivity"]}["b"] < 0.01


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0)), min_size=1))
def test_the_front_holds_all_that_nothing_beats(points: dict[str, tuple[float, float]]) -> None:
    front = pareto_front(points)
    for name, (cost, value) in points.items():
        beaten = any(c <= cost and v >= value and (c, v) != (cost, value) for c, v in points.values())
        twin = any(points[one] == points[name] for one in front)
        assert (not beaten) == twin


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_larger_portfolio_is_never_slower_and_keeps_the_limit(rows: list[tuple[float, float, int]]) -> None:
    speedups = {f"d{index}": {"x": row[0], "y": row[1]} for index, row in enumerate(rows)}
    num_bytes = {f"d{index}": row[2] for index, row in enumerate(rows)}
    mix, before = {"x": 0.3, "y": 0.7}, 1.0
    for count in (1, 2, 3):
        found = best_portfolio(speedups, mix, count, num_bytes, 10.0)
        assert found.num_bytes <= 10
        assert found.speedup >= before - 1e-9
        before = found.speedup
    assert over_mix({"x": 2.0, "y": 2.0}, mix) == pytest.approx(2.0)


def test_of_equally_fast_portfolios_the_smallest_wins() -> None:
    speedups = {name: {"x": 2.0, "y": 1.5} for name in ("a", "b", "c")}
    for count in (1, 2):
        found = best_portfolio(speedups, {"x": 0.5, "y": 0.5}, count, {"a": 30, "b": 10, "c": 20}, 100.0)
        assert found.drafters == ("b",)


def test_equal_figures_can_never_be_told_apart() -> None:
    figures = {"a": Figure(1.5, 1.4, 1.6), "b": Figure(1.5, 1.4, 1.6)}
    (doubt,) = doubts("a", figures, 10)
    assert doubt.chance == pytest.approx(0.5)
    assert doubt.prompts_needed == float("inf")


def test_the_verb_takes_several_reports(tmp_path: Path) -> None:
    for name, made in (("one", report(a=(60, 90))), ("two", report(b=(90, 60)))):
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    words = ["select", str(tmp_path / "one.json"), str(tmp_path / "two.json"), "--memory-fraction", "0.9"]
    shown = CliRunner().invoke(app, [*words, "--set", "portfolio=2", "--json"])
    assert json.loads(shown.stdout)["portfolio"]["drafters"] == ["a", "b"]
    assert "Best portfolio: a + b" not in CliRunner().invoke(app, words).stdout
    refused = CliRunner().invoke(app, [*words, "--policy", "hedge"])
    assert isinstance(refused.exception, UserError)
    assert "--html go with --simulate" in str(refused.exception)


def test_a_cascade_is_predicted_by_the_formula_and_can_win() -> None:
    """S = tokens / (1 + k rho / s + o), s from the middle model's own report at shorter blocks; chains grow."""
    main, small = cascade_report("draft", 0.4, 3.0), cascade_report("lookup", 0.01, 2.0)
    entries = {one["name"]: one for one in with_cascades(main, {"draft": small})["laws"][0]["drafters"]}
    assert list(entries) == ["draft", "lookup > draft"]
    own = small["laws"][0]["drafters"][0]["predicted_speedup"]
    for k, faster in (("1", 1.0), ("4", max(own["1"], 1.0) if "4" in own else 1.0)):
        tokens = entries["draft"]["mean_tokens_per_call"][k]
        wanted = tokens / (1 + int(k) * 0.4 / min(faster, int(k)))
        assert entries["lookup > draft"]["predicted_speedup"][k] == pytest.approx(wanted)
    assert entries["lookup > draft"]["bytes"] == 2 * 10**8
    chosen = choose_among([main], ROOMY, {"draft": small})
    assert chosen["drafter"] == "lookup > draft"
    assert chosen["predicted_speedup"] > choose_among([main], ROOMY)["predicted_speedup"]
    light = cascade_report("light", 0.1, 2.0)
    chain = choose_among([main], ROOMY, {"draft": light, "light": small})
    assert "lookup > light > draft" in chain["speedups"]
    assert "> draft" in choice_table(chain)
    refused = choose_among([main], SelectSettings(memory_fraction=0.9, runtime="transformers"), {"draft": small})
    assert "Transformers runs no cascade drafter" in refused["reasons"]["lookup > draft"]


def test_cascades_of_unknown_drafters_other_laws_and_circles_are_refused() -> None:
    main, small = cascade_report("draft", 0.4, 3.0), cascade_report("lookup", 0.01, 2.0)
    with pytest.raises(UserError, match="--cascade draught: no report scores a drafter of that name. Known: draft"):
        choose_among([main], ROOMY, {"draught": small})
    with pytest.raises(UserError, match="draft are drafted for by each other"):
        choose_among([main], ROOMY, {"draft": cascade_report("draft", 0.1, 2.0)})
    other = copy.deepcopy(small)
    other["laws"][0]["temperature"] = 0.5
    with pytest.raises(UserError, match="its report was not scored under T=1"):
        choose_among([main], ROOMY, {"draft": other})


def test_energy_is_a_limit_and_the_nearest_miss_is_named() -> None:
    """At 50 W a plain token of 10 ms takes .5 J, and a drafter that is faster takes less."""
    made = report(a=(60, 60), b=(70, 70))
    free = choose_among([made], SelectSettings(memory_fraction=0.9, watts=50))
    joules = {name: one["joules"] for name, one in free["speedups"].items()}
    assert joules["a"] == pytest.approx(0.5 / free["speedups"]["a"]["value"])
    between = (joules["a"] + joules["b"]) / 2
    thrifty = choose_among([made], SelectSettings(memory_fraction=0.9, watts=50, max_joules=between))
    assert thrifty["drafter"] == "a"
    assert f"J a token at 50 W, and max_joules allows {between:g}" in thrifty["reasons"]["b"]
    none = choose_among([made], SelectSettings(memory_fraction=0.9, watts=50, max_joules=0.01))
    assert none["drafter"] == ""
    assert "no candidate that fits keeps max_joules=0.01. The nearest is a: " in none["sentence"]
    assert "plain decoding 0.5 J" in none["sentence"]
    with pytest.raises(ValidationError, match="max_joules needs watts"):
        SelectSettings(max_joules=1.0)
