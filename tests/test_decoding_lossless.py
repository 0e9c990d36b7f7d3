"""Every way of decoding keeps the target's law: exact enumeration of whole decoding runs, for any laws."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.acceptance.replay import as_arrays, replay_counts
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Answer, Drafter
from foredraft.decoding import cascade, speculative
from foredraft.decoding.cascade import Cascade
from foredraft.decoding.length import Fallback, FixedLength, LengthPolicy, MarginalLength, WindowLength
from foredraft.decoding.rules import Rule, verify_block, verify_chain
from foredraft.decoding.speculative import Limits, decode, plain_decode
from foredraft.decoding.stopping import ConfidentDrafter
from foredraft.decoding.trees import TreeDrafter, TreeShape
from tests.enumeration import forked_law
from tests.toys import Lookup, MarkovDrafter, MarkovSession, sequence_law

TARGET = torch.tensor([[0.35, 0.65], [0.8, 0.2]]).log()
DRAFT = torch.tensor([[0.55, 0.45], [0.1, 0.9]]).log()
MIDDLE = torch.tensor([[0.2, 0.8], [0.6, 0.4]]).log()
WIDE_TARGET = torch.tensor([[0.2, 0.45, 0.35]]).log().expand(3, 3)
WIDE_DRAFT = torch.tensor([[0.05, 0.75, 0.2]]).log().expand(3, 3)
PLAIN = SamplingLaw()
WARM = SamplingLaw(temperature=1.7)
TRUNCATED = SamplingLaw(top_k=2)


@dataclass(frozen=True)
class Way:
    """One way of decoding, from a source of uniforms to a drafter."""

    drafter: Callable[[Callable[[], float]], Drafter]
    law: SamplingLaw = PLAIN
    k: int = 2
    length: int = 3
    rule: Rule = verify_chain
    target: Float[Tensor, "vocab vocab"] = TARGET
    policy: Callable[[], LengthPolicy] | None = None


def model(table: Tensor, law: SamplingLaw = PLAIN) -> Callable[[Callable[[], float]], MarkovDrafter]:
    return lambda uniform: MarkovDrafter(table, law, uniform=uniform)


def tree(table: Tensor, shape: TreeShape, law: SamplingLaw = PLAIN) -> Callable:
    return lambda uniform: TreeDrafter(MarkovDrafter(table, law, uniform=uniform), shape)


def cascaded(uniform: Callable[[], float]) -> Cascade:
    return Cascade(MarkovDrafter(MIDDLE), MarkovSession(MIDDLE), MarkovDrafter(DRAFT, uniform=uniform), 1)


def of_four_levels(uniform: Callable[[], float]) -> Cascade:
    """Return copies that draft for a light model, which drafts for the middle model."""
    light = Cascade(MarkovDrafter(DRAFT), MarkovSession(DRAFT), Lookup(2), 1)
    return Cascade(MarkovDrafter(MIDDLE), MarkovSession(MIDDLE), light, 1)


WAYS = {
    "chain": Way(model(DRAFT)),
    "chain of a greedy draft": Way(model(DRAFT, GREEDY)),
    "chain, target at another temperature": Way(model(DRAFT), WARM),
    "chain, target of the two best tokens": Way(model(WIDE_DRAFT), TRUNCATED, 1, 2, target=WIDE_TARGET),
    "wide chain": Way(model(WIDE_DRAFT), k=1, length=1, target=WIDE_TARGET),
    "chain, greedy target": Way(model(DRAFT), GREEDY),
    "block": Way(model(DRAFT), rule=verify_block),
    "block of a greedy draft": Way(model(DRAFT, GREEDY), rule=verify_block),
    "block, target at another temperature": Way(model(DRAFT), WARM, rule=verify_block),
    "copies": Way(lambda uniform: Lookup(2)),
    "cascade": Way(cascaded, length=2),
    "cascade of four levels": Way(of_four_levels, length=2),
    "tree of draws": Way(tree(DRAFT, TreeShape(3, 2)), length=2),
    "tree of draws without replacement": Way(tree(WIDE_DRAFT, TreeShape(3, 3)), k=1, length=1, target=WIDE_TARGET),
    "tree of best children": Way(tree(DRAFT, TreeShape(5, 2, 1.0), GREEDY), length=2),
    "tree of best children, greedy target": Way(tree(DRAFT, TreeShape(5, 2, 1.0), GREEDY), GREEDY, length=2),
    "stop by confidence": Way(lambda uniform: ConfidentDrafter(MarkovDrafter(DRAFT, uniform=uniform), 0.6)),
    "length by the window": Way(model(DRAFT), policy=lambda: WindowLength(1, 2, window=1)),
    "length by the margin": Way(model(DRAFT), policy=lambda: MarginalLength(2, 0.1, lambda width: 1.0)),
    "fallback to plain decoding": Way(model(DRAFT), policy=lambda: Fallback(FixedLength(1), after=1, pause=1)),
}


def assert_lossless(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerate all runs of one way of decoding and compare the law of its answers with plain decoding's."""
    session, prompt = MarkovSession(way.target), torch.tensor([0, 1, 0])

    def run(uniform: Callable[[], float]) -> tuple[int, ...]:
        for module in (speculative, cascade):
            monkeypatch.setattr(module, "uniforms", lambda generator: uniform)
        k = way.k if way.policy is None else way.policy()
        drafter, limits = way.drafter(uniform), Limits(way.length)
        answer = decode(session, drafter, prompt, way.law, k, limits, torch.Generator(), way.rule)
        return tuple(answer.token_ids.tolist())

    found, wanted = forked_law(run), sequence_law(session, prompt, way.law, way.length)
    for answer in {*found, *wanted}:
        assert found.get(answer, 0.0) == pytest.approx(wanted.get(answer, 0.0), abs=1e-6), answer


@pytest.mark.parametrize(
    "name", [pytest.param(way, marks=[pytest.mark.slow] if "four levels" in way else []) for way in WAYS]
)
def test_every_way_of_decoding_keeps_the_targets_law_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_lossless(WAYS[name], monkeypatch)


def test_a_draft_equal_to_the_target_emits_k_plus_one_tokens_a_call() -> None:
    session, generator = MarkovSession(TARGET), torch.Generator().manual_seed(0)
    for rule in (verify_chain, verify_block):
        decoded = decode(
            session, MarkovDrafter(TARGET), torch.tensor([0]), SamplingLaw(), 3, Limits(12), generator, rule
        )
        assert [block.emitted for block in decoded.blocks] == [4, 4, 4]


def mean_accepted(way: Way, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the mean draft tokens accepted in the first block."""
    session = MarkovSession(way.target)

    def run(uniform: Callable[[], float]) -> int:
        monkeypatch.setattr(speculative, "uniforms", lambda generator: uniform)
        limits = Limits(way.k)
        answer = decode(
            session, way.drafter(uniform), torch.tensor([0]), way.law, way.k, limits, torch.Generator(), way.rule
        )
        return answer.blocks[0].accepted

    return sum(count * chance for count, chance in forked_law(run).items())


def test_block_verification_never_accepts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    by_token = mean_accepted(Way(model(DRAFT)), monkeypatch)
    by_block = mean_accepted(Way(model(DRAFT), rule=verify_block), monkeypatch)
    assert by_block > by_token + 0.01
    assert mean_accepted(Way(model(DRAFT), k=1, rule=verify_block), monkeypatch) == pytest.approx(
        mean_accepted(Way(model(DRAFT), k=1), monkeypatch)
    )


def test_more_children_accept_more(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = [
        mean_accepted(Way(tree(WIDE_DRAFT, TreeShape(width, width)), k=1, target=WIDE_TARGET), monkeypatch)
        for width in (1, 2, 3)
    ]
    assert accepted[0] == pytest.approx(float(torch.minimum(WIDE_TARGET.exp(), WIDE_DRAFT.exp())[0].sum()))
    assert accepted[0] + 0.01 < accepted[1] < accepted[2] - 0.01


def test_greedy_trees_equal_plain_decoding_and_their_replay() -> None:
    table = torch.randn(25, 5, generator=torch.Generator().manual_seed(4))
    session, prompt = MarkovSession(table, order=2), torch.tensor([1, 2])
    drafter = TreeDrafter(MarkovDrafter(table + 0.8 * table.roll(1, 0), GREEDY, order=2), TreeShape(8, 3, 0.5))
    plain = plain_decode(session, prompt, GREEDY, Limits(20), torch.Generator())
    literal = decode(session, drafter, prompt, GREEDY, 3, Limits(20), torch.Generator())
    assert literal.token_ids.tolist() == plain.token_ids.tolist()
    answer = Answer(torch.cat([prompt, literal.token_ids]), len(prompt))
    replayed = replay_counts(*as_arrays(*drafter.replay([answer], 3)), [3])
    assert replayed.calls[0] == literal.target_calls < 20
    assert replayed.accepted.sum() == literal.accepted


def test_stop_strings_end_an_answer_with_the_token_that_completes_them() -> None:
    cycle = MarkovSession(torch.eye(4).roll(1, 1) * 50)  # 0 -> 1 -> 2 -> 3 -> 0
    limits = Limits(20, stop_strings=("cd",), text_of=lambda tokens: "".join("abcd"[token] for token in tokens))
    for k in (0, 1, 5):
        decoded = decode(
            cycle, MarkovDrafter(cycle.table, GREEDY), torch.tensor([3]), GREEDY, k, limits, torch.Generator()
        )
        assert decoded.token_ids.tolist() == [0, 1, 2, 3]
        assert decoded.finish_reason == "stop"
