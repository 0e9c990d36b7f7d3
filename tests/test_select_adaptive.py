"""The adaptive drafter as a drafter: the contract, replay that equals decoding, what a batch shares, its errors."""

from functools import partial

import pytest
import torch

from foredraft.acceptance.replay import as_arrays, replay_counts
from foredraft.catalog import names
from foredraft.core.errors import UnknownNameError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY
from foredraft.core.protocols import Answer, BlockOutcome, Drafter, Observer
from foredraft.decoding.speculative import Limits, decode
from foredraft.drafters import load_drafter
from foredraft.select.adaptive import AdaptiveDrafter, Portfolio
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import Score, read_policy
from foredraft.trace.store import Absent
from tests.contract_drafter import check_drafter
from tests.toys import Lookup, MarkovDrafter, MarkovSession

SPEAKER = Absent("tiny", "f", "float32", 272, "t")


def portfolio(policy: str, table: torch.Tensor, lengths: tuple[int, ...] = (1, 3)) -> Portfolio:
    """Return a drafter that is scored on every block beside one that is scored when it drafts."""
    drafters: dict[str, Drafter] = {
        "lookup": Lookup(table.shape[1]),
        "guess": MarkovDrafter(table, GREEDY, order=2, num_parameters=1),
    }
    return Portfolio(drafters, lengths, {1: BlockCosts.by_ratio([0.001, 0.002], max(lengths))}, read_policy(policy))


@pytest.mark.slow
def test_a_fixed_choice_holds_the_contract_of_drafters() -> None:
    generator = torch.Generator().manual_seed(0)
    phrase = torch.randint(0, 5, (6,), generator=generator)
    answers = [Answer(phrase.repeat(2), 7), Answer(torch.randint(0, 5, (9,), generator=generator), 4)]
    table = torch.randn(25, 5, generator=generator)

    def made(arm: int) -> AdaptiveDrafter:
        return AdaptiveDrafter(portfolio(f"fixed:arm={arm}", table))

    for arm in (0, 4):
        check_drafter(made(arm), answers, again=partial(made, arm))


@pytest.mark.parametrize("policy", names("policies"))
def test_replay_takes_the_path_that_decoding_takes(policy: str) -> None:
    """Target calls and accepted tokens of two texts, decoded one after the other, equal those of their replay.

    Replayed again they are the same: replay starts cold and teaches the drafter nothing.
    """
    table = 2 * torch.randn(25, 5, generator=torch.Generator().manual_seed(1))
    session, limits = MarkovSession(table, order=2), Limits(24)
    near = table + 1.5 * table.roll(1, 0)
    literal, replayed = (AdaptiveDrafter(portfolio(policy, near)) for _ in range(2))
    prompts = (torch.tensor([1, 2]), torch.tensor([4, 0]))
    decoded = [decode(session, literal, prompt, GREEDY, 3, limits, torch.Generator()) for prompt in prompts]
    answers = [Answer(torch.cat([prompt, one.token_ids]), 2) for prompt, one in zip(prompts, decoded, strict=True)]
    for _ in range(2):
        for one, emitted in zip(decoded, replayed.replay(answers, 3), strict=True):
            counts = replay_counts(*as_arrays(emitted), [3])
            assert counts.calls[0] == one.target_calls
            assert counts.accepted.sum() == one.accepted
    assert replayed.controller.tokens == 0


def test_the_cap_of_a_block_is_kept() -> None:
    table = torch.randn(25, 5, generator=torch.Generator().manual_seed(1))
    drafter = AdaptiveDrafter(portfolio("fixed:arm=4", table))
    for cap in (0, 1, 2, 3, 9):
        assert len(drafter.propose(torch.tensor([1, 2, 1, 2]), cap, torch.Generator())) == min(cap, 3)


def test_binding_forgets_and_texts_of_a_batch_teach_each_other() -> None:
    table = torch.randn(25, 5, generator=torch.Generator().manual_seed(1))
    session = MarkovSession(table, order=2)
    drafter = AdaptiveDrafter(portfolio("marginal", table))
    decode(session, drafter, torch.tensor([1, 2]), GREEDY, 3, Limits(40), torch.Generator())
    assert drafter.controller.blocks > 0
    assert drafter.bind(GREEDY).controller.blocks == 0
    batch = drafter.open_batch(2)
    assert all(isinstance(batch.learner(number), Observer) for number in range(2))
    blocks = drafter.controller.blocks
    for number in range(2):
        context = torch.tensor([1, 2])
        proposals = batch.propose({number: context}, {number: 3}, [torch.Generator()] * 2)
        emitted = (*proposals[number].token_ids.tolist(), 0)
        batch.learner(number).observe(BlockOutcome(proposals[number], emitted, len(proposals[number])))
    assert drafter.controller.blocks == blocks + 2


def test_it_is_a_way_of_drafting() -> None:
    drafter = load_drafter("prompt-lookup+adaptive:others=suffix-automaton,policy=ucb,lengths=2-6", SPEAKER)
    assert drafter.kind == "adaptive"
    assert [drafter.portfolio.arms.label(arm) for arm in range(5)] == [
        "no speculation", "prompt-lookup x2", "prompt-lookup x6", "suffix-automaton x2", "suffix-automaton x6",
    ]  # fmt: skip
    weighed = load_drafter("prompt-lookup+adaptive:lengths=4,policy=score:speed=1;quality=0.2", SPEAKER)
    assert isinstance(weighed, AdaptiveDrafter)
    assert weighed.portfolio.policy == Score(speed=1.0, quality=0.2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prompt-lookup+adaptive:policy=huc", "Unknown policy 'huc'"),
        ("prompt-lookup+adaptive:others=prompt-lookup", "stands twice: name each drafter once"),
        ("prompt-lookup+adaptive:lengths=a-b", "lengths are numbers with - between"),
        ("prompt-lookup+adaptive:lengths=0", "draft lengths of 1 or more"),
        ("prompt-lookup+adaptive:target_growth=-0.9", "positive target steps"),
        ("prompt-lookup+adaptive:others=traffic|traffic", "traffic stands twice"),
        ("suffix-automaton+tree+adaptive", "chooses among chains: tree grows trees"),
    ],
)
def test_what_cannot_be_is_refused_in_words(spec: str, message: str) -> None:
    with pytest.raises((UserError, UnknownNameError), match=message):
        load_drafter(spec, SPEAKER)


def test_policies_refuse_options_that_are_none() -> None:
    for text, message in (
        ("ucb:width=wide", "width is a number, not 'wide'"),
        ("ucb:height=1", "ucb takes width, not 'height'"),
        ("ucb:watches=1", "ucb takes width, not 'watches'"),
        ("ucb:width=nan", "ucb:width=nan: width lies in 0 .. 1,000,000"),
        ("hedge:eta=-1", "hedge:eta=-1: eta lies in 0 .. 1,000,000"),
        ("thresholds:limit=-3", "limit lies in 0 .. 1,000,000"),
        ("marginal:eta=1", "marginal takes no options, not 'eta'"),
        ("score:speed=-1", "Weights of a score lie in"),
        ("score:speed=0", "one of them above 0"),
        ("score:speed=1e99", "Weights of a score lie in"),
    ):
        with pytest.raises(UserError, match=message):
            read_policy(text)


def test_an_arm_that_is_none_is_refused() -> None:
    table = torch.randn(25, 5, generator=torch.Generator().manual_seed(1))
    for arm in ("5", "-1", "1.5"):
        drafter = AdaptiveDrafter(portfolio(f"fixed:arm={arm}", table))
        with pytest.raises(UserError, match=f"fixed:arm={arm}: there are arms 0 to 4"):
            drafter.propose(torch.tensor([1, 2]), 3, torch.Generator())


def test_drafters_of_two_vocabularies_are_refused() -> None:
    with pytest.raises(VocabMismatchError, match="speak 5 and 7 tokens"):
        Portfolio({"a": Lookup(5), "b": Lookup(7)}, (1,), {1: BlockCosts.by_ratio([0.1, 0.1], 1)}, read_policy("ucb"))
