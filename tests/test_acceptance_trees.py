"""Trees in an evaluation: what they cost to check, and how exact the figures of each way of drafting are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft.acceptance.audit import audit
from foredraft.acceptance.cost import Costs, Seconds, measure_costs
from foredraft.acceptance.evaluate import score
from foredraft.acceptance.leaderboard import DrafterFacts, LawScores, build_report
from foredraft.core.errors import CapabilityError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import TOKENS_EXACT, Drafter, StatesValidity
from foredraft.decoding.trees import TreeShape
from foredraft.drafters import load_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace
from tests.test_report_warnings import TARGET, scored


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.fixture(scope="module", params=[GREEDY, pytest.param(SamplingLaw(0.8), marks=pytest.mark.slow)], ids=str)
def trace(request: pytest.FixtureRequest, target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    prompts = [Prompt(f"p{n}", "none", ({"role": "user", "content": "seadust oaks " * n},)) for n in (1, 2)]
    settings = TraceSettings(prompts=[PromptSource(file="shipped")], max_new_tokens=16)
    return collect(target, prompts, settings, request.param, tmp_path_factory.mktemp("traces") / "trace")


def seconds(value: float) -> Seconds:
    return Seconds(value, value, value)


@pytest.mark.parametrize(
    ("shape", "nodes"), [((16, 4, 0.5), [4, 12, 16]), ((99, 2, 1.0), [2, 6, 14]), ((3, 1), [1, 2, 3])]
)
def test_a_tree_has_at_most_as_many_nodes_as_its_shape_says(shape: tuple, nodes: list[int]) -> None:
    assert [TreeShape(*shape).num_nodes(depth) for depth in (1, 2, 3)] == nodes


def test_a_block_of_a_tree_pays_for_checking_all_of_it() -> None:
    costs = Costs((seconds(1.0),) * 3, {"t": {1: seconds(0.1), 2: seconds(0.2)}})
    trees = replace(costs, checks={"t": {1: seconds(2.0), 2: seconds(3.0)}})
    assert costs.block_seconds("t", 2) == pytest.approx(1.2)
    assert trees.block_seconds("t", 2) == pytest.approx(3.2)
    assert trees.block_seconds("t", 2, guess_share=0.5) == pytest.approx(0.2 + 0.5 * 3.0 + 0.5 * 1.0)
    assert Costs.from_json(trees.to_json()) == trees


def test_checking_a_tree_is_timed_over_its_nodes(target: LocalTarget, tiny_draft_folder: Path) -> None:
    widths: list[int] = []
    target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    tree = load_drafter(f"{tiny_draft_folder}+tree:max_nodes=12,width=4,width_decay=1", target)
    costs = measure_costs(target, {"tree": tree}, torch.randint(3, 259, (60,)), GREEDY, [1, 3], 3)
    target.model.base_model._forward_pre_hooks.clear()
    assert set(costs.checks["tree"]) == {1, 3}
    # Behind the first rounds, which read the context, a step reads the two tokens that it grew by, and its guesses.
    assert {4, 5, 12, 13} <= {width - 1 for width in widths} | set(widths)
    assert max(width for width in widths if width < 20) >= 13


def test_a_replayed_tree_is_what_literal_decoding_does(
    target: LocalTarget, trace: Trace, tiny_draft_folder: Path
) -> None:
    """At any temperature: a tree of the most probable children is a certain guess."""
    tree = load_drafter(f"{tiny_draft_folder}+tree:max_nodes=6,width=3", target)
    report, law = score("tree", tree, trace, [1, 3]), trace.info.law
    chain = (
        score("chain", load_drafter(str(tiny_draft_folder), target).bind(GREEDY), trace, [1]) if law.is_greedy else None
    )
    if chain is not None:
        assert report.expected_acceptance > chain.expected_acceptance
    prompts = [row.prompt_ids for row in trace.rows(tops=False)]
    found = audit(target, {"tree": (tree.bind(law), 3)}, prompts, law, 16, 0)["tree"]
    assert found.agrees
    if law.is_greedy:
        assert found.calls == pytest.approx(report.calls(3).sum())


def test_a_drawn_tree_is_refused_with_the_reason(target: LocalTarget, trace: Trace, tiny_draft_folder: Path) -> None:
    drawn = load_drafter(f"{tiny_draft_folder}+tree:drawn=true", target)
    if trace.info.law.is_greedy:
        return
    with pytest.raises(CapabilityError, match="only|cannot be replayed"):
        score("tree", drawn, trace, [2])


def test_what_is_not_exact_says_so_in_the_report(target: LocalTarget, tiny_draft_folder: Path) -> None:
    confident = load_drafter(f"{tiny_draft_folder}+confident", target)
    assert isinstance(confident, StatesValidity)
    assert not isinstance(load_drafter(str(tiny_draft_folder), target), StatesValidity)
    drafter: Drafter = confident
    costs = Costs((seconds(1.0), seconds(1.0)), {name: {1: seconds(0.1)} for name in ("sure", "plain")})
    reports = {name: scored(torch.tensor([60.0, 70.0]).double().numpy()) for name in ("sure", "plain")}
    facts = {"sure": DrafterFacts(drafter.kind, 1, 1, validity=confident.validity), "plain": DrafterFacts("x", 1, 1)}
    made = build_report(TARGET, [LawScores(SamplingLaw(), reports, costs, {})], facts)
    entries = {entry["name"]: entry["validity"] for entry in made["laws"][0]["drafters"]}
    assert entries == {"sure": TOKENS_EXACT, "plain": "exact"}
    assert any(note.startswith("sure: replay's tokens are exact") for note in made["notes"])
