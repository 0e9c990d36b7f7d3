"""A drafter that is asked for the first time in a text reads it first: what that costs is measured, and counted."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foredraft.acceptance.audit import audit
from foredraft.acceptance.cost import measure_costs
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer
from foredraft.decoding.speculative import Limits, decode
from foredraft.drafters import load_drafter
from foredraft.models.target import load_target
from foredraft.select.adaptive import AdaptiveDrafter, Portfolio
from foredraft.select.arms import PLAIN, Arms
from foredraft.select.block_costs import BlockCosts, at_batch_size
from foredraft.select.controller import Controller
from foredraft.select.policies import read_policy
from foredraft.select.simulate import Traffic, fixed_runs, simulate
from foredraft.select.unread import Unread
from foredraft.select.walk import Recorded, shared_with_last, walk
from tests.toys import Lookup, MarkovDrafter, MarkovSession

LENGTHS = (1, 3)
FREE = BlockCosts.by_ratio([0.002, 0.2], 3)
DEAR = replace(FREE, reading=np.array([0.0, 0.02]))


def guessed(size: int, context: int, shared: int = 0) -> Recorded:
    """Return an answer in which the second of two drafters is right everywhere."""
    room = np.minimum(3, size - np.arange(size))
    return Recorded(
        np.stack([room, room]),
        np.stack([np.zeros_like(room), room]),
        np.zeros(size, np.int64),
        context=context,
        shared=shared,
    )


def test_a_text_is_read_once_and_again_only_where_another_drafter_went_on() -> None:
    unread, seconds = Unread(2), np.array([1.0, 2.0])
    unread.start(10)
    assert unread.read((1,), seconds) == 20.0
    unread.grow(3, (1,))
    assert unread.read((0, 1), seconds) == 13.0
    unread.grow(2, ())
    assert unread.read((0, 1), seconds) == 6.0
    unread.grow(4, (0,))  # 19 tokens by now, of which the second drafter has read 15
    unread.start(30, shared=17)
    assert [unread.tokens(drafter) for drafter in range(2)] == [13.0, 15.0]


class Slow(MarkovDrafter):
    """Takes 1 ms for a block, and 2 ms for every token that it has not read but for the two of the block before."""

    __slots__ = ("read",)

    def bind(self, law: SamplingLaw) -> "Slow":
        return Slow(self.table, law)

    def propose(self, context: torch.Tensor, k: int, generator: torch.Generator) -> Proposal:
        known = getattr(self, "read", 0)
        time.sleep(0.001 + 0.002 * (len(context) - known - (2 if known else 0)))
        object.__setattr__(self, "read", len(context))
        return super().propose(context, k, generator)


def test_what_a_text_shares_with_the_last_one_is_found_up_to_its_answer() -> None:
    texts = ([1, 2, 3, 4], [1, 2, 3, 9, 9], [5, 2, 3, 9], [5, 2, 3, 9])
    answers = [Answer(torch.tensor(text), start) for text, start in zip(texts, (2, 4, 3, 3), strict=True)]
    assert shared_with_last(answers) == [0, 3, 0, 3]


def test_the_time_of_reading_is_measured_by_token() -> None:
    table = torch.randn(7, 7)
    target = SimpleNamespace(vocab_size=7, session=lambda: MarkovSession(table))
    drafters = {"slow": Slow(table, GREEDY), "at once": MarkovDrafter(table, GREEDY)}
    costs = measure_costs(target, drafters, torch.randint(7, (40,)), GREEDY, [1], 3)
    assert costs.reading_seconds("slow") == pytest.approx(0.002, rel=0.5)
    assert costs.reading_seconds("at once") < 0.0005
    kept = BlockCosts.of(costs, ["at once", "slow"], 1)
    assert kept.reading[1] == costs.reading_seconds("slow")
    assert (BlockCosts.from_json(kept.to_json()).reading == kept.reading).all()


def test_a_report_says_it_for_every_batch_size() -> None:
    law = {
        "target_seconds": {"1": 1.0, "2": 1.1},
        "overhead_seconds": 0.0,
        "batch": {"4": {"target_seconds": {"1": 2.0, "2": 2.1}, "overhead_seconds": 0.0}},
        "drafters": [
            {
                "name": "d",
                "draft_seconds": {"1": 0.1},
                "reading_seconds": 0.01,
                "batch": {"4": {"draft_seconds": {"1": 0.3}, "reading_seconds": 0.04}},
            }
        ],
    }
    assert BlockCosts.of_report(law, ["d"], 1).reading.tolist() == [0.01]
    assert BlockCosts.of_report(at_batch_size(law, "4"), ["d"], 1).reading.tolist() == [0.04]


def test_a_fixed_drafter_pays_for_the_context_of_every_answer() -> None:
    """All of it but for how the text before began, which it has read."""
    stream = Traffic(("copy", "model"), (True, False), (guessed(20, 100), guessed(30, 90, shared=50)))
    arms = Arms.of(stream.names, LENGTHS)
    for arm, run in enumerate(fixed_runs(stream, DEAR, LENGTHS)):
        free = fixed_runs(stream, FREE, LENGTHS)[arm].seconds
        assert (run.seconds - free).tolist() == pytest.approx([2.0, 0.8] if arms.drafter[arm] == 1 else [0.0, 0.0])
        walked = simulate(stream, read_policy(f"fixed:arm={arm}"), DEAR, LENGTHS)
        assert walked.seconds == pytest.approx(run.seconds)


@pytest.mark.parametrize("policy", ["marginal", "hedge", "contextual", "ucb", "thompson"])
def test_a_draft_is_left_out_of_answers_that_are_too_short_for_what_it_reads_first(policy: str) -> None:
    """It gains half of a step in every token, and takes 40 steps to read: 64 tokens do not pay, 600 do."""
    assert share_of_model(policy, size=64, context=2000) < 0.2
    assert share_of_model(policy, size=600, context=2000) > 0.5
    assert share_of_model(policy, size=64, context=0) > 0.8


def share_of_model(policy: str, size: int, context: int) -> float:
    """Return the share of blocks that the model gets in the later half of 40 answers."""
    controller = Controller(Arms.of(("copy", "model"), LENGTHS), DEAR, read_policy(policy), (True, False))
    unread = Unread(2)
    paths = [walk(guessed(size, context), controller, unread) for _ in range(40)]
    late = np.concatenate([path.arm for path in paths[20:]])
    return float((controller.arms.drafter[late] == 1).mean())


def test_a_probe_waits_until_the_budget_holds_what_it_reads() -> None:
    def probes(context: int) -> int:
        controller = Controller(Arms.of(("copy", "model"), LENGTHS), DEAR, read_policy("marginal"), (True, False))
        unread, count = Unread(2), 0
        for block in range(600):
            if block % 60 == 0:
                controller.ended()
                unread.start(context)
            choice = controller.decide(0, unread)
            reading = unread.read(choice.readers, DEAR.reading)
            if choice.arm != PLAIN:
                controller.seen(0, choice.drafter, choice.k, choice.k, 0)
            controller.done(choice, choice.k, 1, reading)
            unread.grow(1, choice.readers)
            count += choice.is_probe and choice.drafter == 1
        return count

    assert probes(2000) == 0 < probes(100) < probes(0)


def test_decoding_counts_the_seconds_that_the_simulation_counts() -> None:
    """The same blocks, the same reading: of two texts, the second of which goes on from the first."""
    table = 2 * torch.randn(25, 5, generator=torch.Generator().manual_seed(1))
    drafters = {"copy": Lookup(5), "model": MarkovDrafter(table + table.roll(1, 0), GREEDY, order=2, num_parameters=1)}
    drafter = AdaptiveDrafter(Portfolio(drafters, LENGTHS, {1: DEAR}, read_policy("fixed:arm=4")))
    session, prompt = MarkovSession(table, order=2), torch.tensor([1, 2] * 50)

    def seconds(text: torch.Tensor) -> tuple[float, int, torch.Tensor]:
        before = drafter.controller.seconds
        one = decode(session, drafter, text, GREEDY, 3, Limits(30), torch.Generator())
        return drafter.controller.seconds - before, one.target_calls, one.token_ids

    block = DEAR.drafts[1, 3] + DEAR.target[3] + DEAR.overhead
    first, calls, written = seconds(prompt)
    assert first == pytest.approx(calls * block + 100 * 0.02, abs=1e-6)
    longer = torch.cat([prompt, written, torch.tensor([3] * 10)])
    second, calls, _ = seconds(longer)
    assert second == pytest.approx(calls * block + 10 * 0.02, abs=1e-6)
    assert drafter.controller.texts == 1


def test_an_audit_lets_no_draft_read_that_was_not_chosen_and_timed(
    tiny_target_folder: Path, tiny_draft_folder: Path
) -> None:
    """Literal calls are those of replay, to the call, since both know the same of what was read."""
    target = load_target(str(tiny_target_folder))
    drafters = {"copy": load_drafter("prompt-lookup", target), "model": load_drafter(str(tiny_draft_folder), target)}
    adaptive = AdaptiveDrafter(Portfolio(drafters, LENGTHS, {1: DEAR}, read_policy("hedge")))
    prompts = [torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    found = audit(target, {"adaptive": (adaptive.bind(GREEDY), 3)}, prompts, GREEDY, 24, 0)["adaptive"]
    assert found.calls == found.expected_calls == found.low == found.high
