"""Choosing among drafters keeps the target's law exactly: every run of every policy is enumerated."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foredraft.catalog import names
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import Proposal
from foredraft.decoding.batched import decode_batch
from foredraft.decoding.speculative import Limits, decode, plain_decode
from foredraft.select.adaptive import AdaptiveDrafter, Portfolio, _Stream
from foredraft.select.block_costs import BlockCosts
from foredraft.select.controller import Choice, Controller
from foredraft.select.ledger import Memory
from foredraft.select.policies import read_policy
from tests.test_decoding_lossless import DRAFT, MIDDLE, Way, assert_lossless
from tests.toys import Lookup, MarkovDrafter, MarkovSession

THRESHOLDS = "thresholds:limit=1.07,long_below=0.4,medium_below=0.5"  # between what laws of two tokens can give
POLICIES = [THRESHOLDS if name == "thresholds" else name for name in names("policies")]
QUICK = ("hedge", THRESHOLDS)  # one that draws, one that looks at laws; -m slow enumerates the rest


def adaptive(policy: str, uniform: Callable[[], float] | None = None) -> AdaptiveDrafter:
    """Return an adaptive drafter over two models and a lookup; one block is enough to change its mind."""
    law = SamplingLaw()
    drafters = {
        "draft": MarkovDrafter(DRAFT, law, uniform=uniform, num_parameters=1),
        "middle": MarkovDrafter(MIDDLE, law, uniform=uniform, num_parameters=1),
        "lookup": Lookup(2),
    }
    costs = BlockCosts.by_ratio([0.001, 0.003, 0.002], 2)
    return AdaptiveDrafter(Portfolio(drafters, (1, 2), {1: costs}, read_policy(policy), memory=Memory(weight=0.1)), law)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(policy, marks=() if policy in QUICK else pytest.mark.slow) for policy in (*POLICIES, "fixed:arm=2")],
)
def test_every_policy_keeps_the_targets_law_exactly(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, decide = set(), Controller.decide

    def recorded(controller: Controller, *where: Any) -> Choice:
        choice = decide(controller, *where)
        chosen.add(choice.arm)
        return choice

    monkeypatch.setattr(Controller, "decide", recorded)
    assert_lossless(Way(lambda uniform: adaptive(policy, uniform), length=2), monkeypatch)
    assert len(chosen) > 1 or policy.startswith("fixed"), "nothing was chosen among"


def test_a_choice_by_the_value_of_drawn_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: both models draw, and the proposal that starts with token 1 is taken."""

    def best_of_two(stream: _Stream, context: torch.Tensor, k: int, generator: torch.Generator) -> Proposal:
        drawn = [drafter.propose(context, 1, generator) for drafter in stream.drafters[:2]]
        return max(drawn, key=lambda proposal: int(proposal.token_ids[0]))

    with patch.object(_Stream, "propose", best_of_two), pytest.raises(AssertionError):
        assert_lossless(Way(lambda uniform: adaptive("hedge", uniform), length=1), monkeypatch)


@pytest.mark.parametrize("policy", names("policies"))
def test_greedy_text_is_that_of_plain_decoding_alone_and_in_a_batch(policy: str) -> None:
    table = torch.randn(25, 5, generator=torch.Generator().manual_seed(4))
    session, prompts = MarkovSession(table, order=2), [torch.tensor([1, 2]), torch.tensor([3, 0])]
    drafters = {
        "close": MarkovDrafter(table + 0.8 * table.roll(1, 0), GREEDY, order=2, num_parameters=1),
        "lookup": Lookup(5),
    }
    costs = BlockCosts.by_ratio([0.1, 0.001], 4)
    portfolio = Portfolio(drafters, (1, 4), {1: costs}, read_policy(policy))
    wanted = [plain_decode(session, ids, GREEDY, Limits(12), torch.Generator()).token_ids.tolist() for ids in prompts]
    drafter = AdaptiveDrafter(portfolio).bind(GREEDY)
    for ids, text in zip(prompts, wanted, strict=True):
        assert decode(session, drafter, ids, GREEDY, 4, Limits(12), torch.Generator()).token_ids.tolist() == text
    batch, generators = _Sessions(session), [torch.Generator()] * 2
    found = decode_batch(batch, drafter.bind(GREEDY), prompts, GREEDY, 4, Limits(12), generators)
    assert [one.token_ids.tolist() for one in found] == wanted


class _Sessions:
    def __init__(self, session: MarkovSession) -> None:
        self._session = session

    def logits(self, texts: dict[int, torch.Tensor], last: dict[int, int]) -> dict[int, torch.Tensor]:
        return {number: self._session.logits(text, last[number]) for number, text in texts.items()}

    def drop(self, number: int) -> None: ...
