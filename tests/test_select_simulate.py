"""Laws of the simulation: paths, oracles and fixed arms over recorded traffic, and what policies make of a shift."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.catalog import resolve
from foredraft.core.errors import OutputError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.speedup import best_length_marginal
from foredraft.select.arms import PLAIN, Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.controller import Controller
from foredraft.select.ledger import Memory, Vigilance
from foredraft.select.policies import read_policy
from foredraft.select.simulate import (
    Traffic,
    fixed_runs,
    position_oracle,
    record,
    request_oracle,
    simulate,
)
from foredraft.select.unread import Unread
from foredraft.select.walk import Recorded, walk
from foredraft.selection import simulate_policies
from foredraft.selection_table import simulation_table
from foredraft.settings import SimulateSettings
from tests.toys import Lookup, MarkovDrafter
from tests.traces import build_trace, trace_row

COSTS = BlockCosts.by_ratio([0.002, 0.002], 8, target_growth=0.05)
LENGTHS = (2, 8)


def made_up(rates: list[tuple[float, float, int]], seed: int = 0, domain: str = "") -> Recorded:
    """Return an answer over which two drafters are right with the given chances, one stretch after the other."""
    chance = np.random.default_rng(seed)
    right = np.concatenate(
        [chance.random((2, size)) < np.array([[one], [other]]) for one, other, size in rates], axis=1
    )
    size = right.shape[1]
    room = np.minimum(8, size - np.arange(size))
    matched = np.zeros((2, size + 1), np.int64)
    for at in range(size - 1, -1, -1):
        matched[:, at] = np.where(right[:, at], matched[:, at + 1] + 1, 0)
    return Recorded(np.stack([room, room]), np.minimum(matched[:, :-1], room), np.ones(size, np.int64), domain)


def traffic(*answers: Recorded, free: tuple[bool, bool] = (True, True)) -> Traffic:
    return Traffic(("one", "other"), free, answers)


def test_a_fixed_policy_takes_as_long_as_its_arm_alone() -> None:
    stream = traffic(made_up([(0.8, 0.2, 300)]), made_up([(0.1, 0.6, 200)], 1))
    alone = fixed_runs(stream, COSTS, LENGTHS)
    for arm, run in enumerate(alone):
        walked = simulate(stream, read_policy(f"fixed:arm={arm}"), COSTS, LENGTHS)
        assert walked.seconds == pytest.approx(run.seconds)
        assert walked.calls.tolist() == run.calls.tolist()


def test_oracles_bound_what_can_be_reached() -> None:
    stream = traffic(*(made_up([(0.9, 0.1, 40), (0.1, 0.9, 40)], seed) for seed in range(2)))
    fixed = fixed_runs(stream, COSTS, LENGTHS)
    by_request, by_position = request_oracle(fixed), position_oracle(stream, COSTS, LENGTHS)
    assert (by_position.seconds <= by_request.seconds).all()
    assert (by_request.seconds <= np.stack([run.seconds for run in fixed]).min(0) + 1e-12).all()
    for policy in ("hedge", "marginal", "ucb", "thompson", "contextual"):
        run = simulate(stream, read_policy(policy), COSTS, LENGTHS, deciding=0.0)
        assert run.tokens.sum() == stream.tokens
        assert by_position.seconds.sum() <= run.seconds.sum()


def test_the_fastest_path_is_the_best_of_all_paths() -> None:
    """Against all sequences of arms over a short answer."""
    answer = made_up([(0.6, 0.4, 7)], seed=3)
    arms = Arms.of(("one", "other"), LENGTHS)

    def best(at: int) -> float:
        if at >= len(answer):
            return 0.0
        options = [COSTS.plain + best(at + 1)]
        for drafter, k in zip(arms.drafter[1:], arms.k[1:], strict=True):
            offered, kept = (
                min(int(part[drafter, at]), k, len(answer) - at) for part in (answer.offered, answer.matched)
            )
            seconds = COSTS.drafts[drafter, k] + COSTS.target[offered] + COSTS.overhead
            options.append(seconds + best(min(at + kept + 1, len(answer))))
        return min(options)

    assert position_oracle(traffic(answer), COSTS, LENGTHS).seconds[0] == pytest.approx(best(0))


@pytest.mark.parametrize(
    "policy",
    ["hedge", *(pytest.param(name, marks=pytest.mark.slow) for name in ("marginal", "contextual", "ucb", "thompson"))],
)
def test_text_that_no_drafter_can_guess_costs_almost_nothing(policy: str) -> None:
    """At least .98 of plain decoding, the cold start and the price of choosing included."""
    stream = traffic(made_up([(0.01, 0.01, 1500)]))
    costs = BlockCosts(0.03 * COSTS.target, 0.03 * COSTS.drafts)
    run = simulate(stream, read_policy(policy), costs, LENGTHS)
    assert run.seconds.sum() * 0.98 <= 1500 * costs.plain


@pytest.mark.parametrize("policy", ["hedge", "marginal", "contextual"])
def test_a_switch_is_followed_within_thirty_blocks(policy: str) -> None:
    """90 % of the new best arm's rate from 30 blocks behind the switch on."""
    before, after = (0.9, 0.1, 600), (0.1, 0.9, 600)
    answer = made_up([before, after], seed=5)
    controller = Controller(Arms.of(("one", "other"), LENGTHS), COSTS, read_policy(policy), (True, True), (), 8)
    path = walk(answer, controller, Unread(2))
    first = int(np.searchsorted(path.start, 600)) + 30
    rate = path.tokens[first:].sum() / path.seconds[first:].sum()
    tail = traffic(made_up([after], seed=6))
    best = max(run.tokens_per_second for run in fixed_runs(tail, COSTS, LENGTHS))
    assert rate >= 0.9 * best


def test_a_drafter_that_was_given_up_is_tried_again() -> None:
    """A model is seen only when it drafts: useless at first, it is found out when it gets good."""
    answer = made_up([(0.02, 0.0, 300), (0.95, 0.0, 600)], seed=2)
    controller = Controller(Arms.of(("one", "other"), LENGTHS), COSTS, read_policy("marginal"), (False, True), (), 8)
    path = walk(answer, controller, Unread(2))
    late = path.arm[path.start > 700]
    assert (controller.arms.drafter[late] == 0).mean() > 0.9
    assert controller.shifts > 0


def test_thresholds_take_the_stronger_drafter_where_guesses_fail_and_long_blocks_where_they_hold() -> None:
    """Guesses without a law count too, those of a greedy model among them."""
    costs = BlockCosts.by_ratio([0.002, 0.2], 8)
    arms = Arms.of(("weak", "strong"), (1, 4, 8))
    controller = Controller(arms, costs, read_policy("thresholds"), (True, False))

    def after(drafter: int, accepted: int) -> tuple[str, int]:
        for _ in range(150):
            controller.decide()  # estimates what the next block is compared with
            controller.seen(0, drafter, 8, 8, accepted)
        choice = controller.decide()
        return arms.names[choice.drafter], choice.k

    assert after(0, 8) == ("weak", 8)
    assert after(0, 0)[0] == "strong"
    assert after(1, 8) == ("strong", 8)
    assert after(1, 0) == ("strong", 1)


def test_watching_while_drafting_leaves_the_budget_for_watching_where_nothing_is_drafted() -> None:
    """Right for 200 blocks, then useless: once nothing is drafted, the drafters are still scored."""
    controller = Controller(Arms.of(("one", "other"), LENGTHS), COSTS, read_policy("marginal"), (True, True))
    watched = []
    for block in range(300):
        choice, accepted = controller.decide(), 8 if block < 200 else 0
        controller.seen(0, 0, 8, 8, accepted)
        controller.seen(0, 1, 8, 8, 0)
        controller.done(choice, choice.k, min(accepted, choice.k) + 1)
        if block >= 200 and choice.arm == PLAIN:
            watched.append(choice.watch)
    assert any(watched)


def test_costs_that_do_not_cover_the_choice_are_refused() -> None:
    arms = Arms.of(("one", "other"), LENGTHS)
    for costs in (BlockCosts.by_ratio([0.1, 0.1], 7), BlockCosts.by_ratio([0.1], 8)):
        with pytest.raises(UserError, match="needed are 2 of up to 8, and steps of up to 9"):
            Controller(arms, costs, read_policy("marginal"), (True, True))


def test_as_the_batch_grows_the_length_goes_to_zero() -> None:
    """Target steps that take as long as they have tokens: speculation stops by itself."""
    answer = made_up([(0.6, 0.3, 500)], seed=4)
    lengths = []
    for growth in (0.0, 0.1, 0.4, 1.0):
        costs = BlockCosts.by_ratio([0.002, 0.002], 8, target_growth=growth)
        controller = Controller(
            Arms.of(("one", "other"), (1, 2, 4, 8)), costs, read_policy("marginal"), (True, True), (), 8
        )
        path = walk(answer, controller, Unread(2))
        lengths.append(float(controller.arms.k[path.arm[len(path.arm) // 2 :]].mean()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 3
    assert lengths[-1] < 0.1


def test_memory_is_weighed_where_the_targets_is_known() -> None:
    """Of two drafters the better one takes half of the target's memory, which is worth more than its speed."""
    stream = replace(traffic(made_up([(0.9, 0.6, 400)])), num_bytes=(50, 0))
    policy = read_policy("score:speed=1,resource=20")
    for target_bytes, drafter in ((0, 0), (100, 1)):
        run = simulate(stream, policy, COSTS, LENGTHS, target_bytes=target_bytes)
        late = Arms.of(stream.names, LENGTHS).drafter[run.arms[0][50:]]
        assert (late == drafter).mean() > 0.9


def test_ratios_of_several_requests_make_verifying_cost_and_leave_the_share_of_a_draft_step() -> None:
    one, many = (BlockCosts.by_ratio([0.1], 4, 0.02, requests) for requests in (1, 32))
    assert one.drafts[0, 1] / one.target[0] == pytest.approx(many.drafts[0, 1] / many.target[0])
    assert many.target[4] / many.target[0] > 2.0 > one.target[4] / one.target[0]


def test_the_largest_rate_has_the_length_of_the_marginal_rule() -> None:
    """Decaying acceptance, seen often: the arm chosen is the length of MATHS 6."""
    for first, ratio in ((0.9, 0.02), (0.8, 0.1), (0.6, 0.05), (0.3, 0.4)):
        acceptance = [first * 0.95**position for position in range(8)]
        costs = BlockCosts.by_ratio([ratio], 8)
        controller = Controller(
            Arms.of(("draft",), range(1, 9)), costs, read_policy("marginal"), (False,),
            memory=Memory(fade=1.0), vigilance=Vigilance(surprise=0.0, drift=9.0),
        )  # fmt: skip
        chance = np.random.default_rng(0)
        for _ in range(800):
            run = np.logical_and.accumulate(chance.random(8) < acceptance).sum()
            controller.seen(0, 0, 8, 8, int(run))
        wanted = best_length_marginal(acceptance, ratio, lambda width: 1.0)
        assert abs(controller.decide().k - wanted) <= (1 if wanted else 0)


def test_a_trace_is_simulated_from_the_command_line_down(tmp_path: Path) -> None:
    phrase = list(range(10, 18))
    rows = [trace_row(f"r{n}", phrase * 2, phrase * 4, domain="copy") for n in range(3)]
    rows += [trace_row(f"s{n}", [3, 4], list(range(20 * n + 20, 20 * n + 40)), domain="new") for n in range(3)]
    trace = build_trace(tmp_path / "trace", rows)
    found = simulate_policies(
        [trace], ["prompt-lookup", "long=suffix-automaton"], ["hedge", "fixed"], SimulateSettings(lengths=[2, 4])
    )
    assert found["tokens"] == 3 * 32 + 3 * 20
    assert found["drafters"] == ["prompt-lookup", "long"]
    hedge, fixed = found["policies"]
    assert fixed["over_plain"] == pytest.approx(1.0)
    assert hedge["domains"]["copy"]["over_plain"] > 1.5
    assert 0.95 < hedge["domains"]["new"]["over_plain"] <= 1.01
    assert found["position_oracle"]["over_plain"] >= found["request_oracle"]["over_plain"] - 1e-9
    assert sum(hedge["domains"]["copy"]["chosen"].values()) == pytest.approx(1.0)
    assert hedge["over_time"][-1]["regret_seconds"] == pytest.approx(hedge["regret_seconds"])
    table = simulation_table(found)
    assert "hedge, by domain:" in table
    assert "none was measured" in table
    with pytest.raises(UserError, match="--drafter long stands twice: write name=spec"):
        simulate_policies([trace], ["long=suffix-automaton", "long=prompt-lookup"], ["hedge"], SimulateSettings())
    (tmp_path / "there.json").write_text("")
    with pytest.raises(OutputError, match="never overwritten"):
        simulate_policies([trace], ["prompt-lookup"], ["hedge"], SimulateSettings(), out=tmp_path / "there.json")
    with pytest.raises(OutputError, match="name .*mine.json, say"):
        simulate_policies([trace], ["prompt-lookup"], ["hedge"], SimulateSettings(), out=tmp_path / "mine")


def test_drawn_tokens_are_accepted_with_their_chance() -> None:
    """Sampled drafts and targets: matched first tokens have the mean of min(1, draft / target)."""
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    law = SamplingLaw()
    text = torch.randint(0, 3, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    probs = torch.full((2999, 3), 1 / 3)
    row = trace_row("r", text[:1], text[1:], probs, top=3, greedy=False)
    drafters = {"model": MarkovDrafter(table, law, num_parameters=1), "lookup": Lookup(3)}
    stream = record(drafters, [row], 4)
    expected = float(torch.softmax(table, -1).mul(3).clamp(max=1.0).mean())
    assert stream.model_free == (False, True)
    assert (stream.answers[0].matched[0] > 0).mean() == pytest.approx(expected, abs=0.04)
    assert drafters["lookup"].law == GREEDY


def test_what_learns_from_an_answer_knows_it_at_the_next() -> None:
    text = list(range(40, 70))
    rows = [trace_row(name, [1, 2, 3], text) for name in ("a", "b")]
    learner = resolve("drafters", "traffic")(100, capacity=4096, segment=64)
    first, second = (answer.matched[0] for answer in record({"traffic": learner}, rows, 4).answers)
    assert first.sum() == 0
    assert second.mean() > 2
