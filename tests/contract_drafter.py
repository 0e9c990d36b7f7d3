"""What every drafter must hold to, as checks that run over any of them.

`check_drafter` runs all checks; tests/test_contract_drafters.py applies it to everything registered.
A law at one position is compared within TOLERANCE, since a batched pass rounds differently.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.proposal import ROOT, Proposal
from foredraft.core.protocols import Answer, BlockOutcome, Branching, Drafter, EmittedProbs, Observer

LAWS = (GREEDY, SamplingLaw(), SamplingLaw(temperature=0.7, top_k=40, top_p=0.9))
TOLERANCE = 1e-4
K = 3


def check_drafter(drafter: Drafter, answers: Sequence[Answer], again: Callable[[], Drafter] | None = None) -> None:
    """Run every check under every law.

    Args:
        answers: Texts over the drafter's vocabulary, some of which it can guess.
        again: Makes another one, for each law; needed by a drafter that learns.
    """
    assert isinstance(drafter, Drafter)
    assert again is not None or not isinstance(drafter, Observer)
    for law in LAWS:
        fresh = again() if again is not None else drafter
        for check in CHECKS:
            check(fresh.bind(law), answers)


def check_figures(drafter: Drafter, answers: Sequence[Answer]) -> None:
    assert drafter.vocab_size > 0
    assert drafter.num_parameters >= 0
    assert drafter.num_bytes >= 0


def check_binding_takes_the_law_or_stays_deterministic(drafter: Drafter, answers: Sequence[Answer]) -> None:
    for law in LAWS:
        assert drafter.bind(law).law in (law, GREEDY)
    assert drafter.bind(GREEDY).law == GREEDY


def check_no_tokens_asked_gives_no_guess(drafter: Drafter, answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert len(drafter.propose(answer.token_ids, 0, _generator())) == 0


def check_proposals_are_chains_or_trees_inside_the_vocabulary(drafter: Drafter, answers: Sequence[Answer]) -> None:
    for answer in answers:
        for k in (1, K):
            proposal = drafter.propose(answer.token_ids, k, _generator())
            if isinstance(drafter, Branching):
                _assert_tree(proposal, k, drafter.num_nodes(k))
            else:
                assert len(proposal) <= k
                assert proposal.is_chain
            for index, token_id in enumerate(proposal.token_ids.tolist()):
                assert 0 <= token_id < drafter.vocab_size
                law = proposal.laws.probs(index, token_id)
                assert law.shape == (drafter.vocab_size,)
                torch.testing.assert_close(law.sum(), torch.tensor(1.0), atol=TOLERANCE, rtol=0)
                assert law[token_id] > 0, "a token was drawn that its law gives no mass"


def check_greedy_laws_are_one_hot(drafter: Drafter, answers: Sequence[Answer]) -> None:
    if drafter.law.is_greedy:
        for answer in answers:
            proposal = drafter.propose(answer.token_ids, K, _generator())
            assert all(proposal.laws.is_one_hot(index) for index in range(len(proposal)))


def check_same_generator_same_guess(drafter: Drafter, answers: Sequence[Answer]) -> None:
    """Unrelated calls, contexts that grow and shrink, and a fresh twin change nothing."""
    if isinstance(drafter, Observer):
        return
    contexts = [answer.token_ids[:length] for answer in answers for length in _lengths(answer)]
    first = [drafter.propose(context, K, _generator(seed)) for seed, context in enumerate(contexts)]
    drafter.replay(answers, K)
    for seed, context in reversed(list(enumerate(contexts))):
        kept = context.clone()
        _assert_same(drafter.propose(context, K, _generator(seed)), first[seed])
        assert torch.equal(context, kept), "the context was changed"
        _assert_same(drafter.bind(drafter.law).propose(context, K, _generator(seed)), first[seed])


def check_replay_has_the_promised_shape(drafter: Drafter, answers: Sequence[Answer]) -> None:
    assert drafter.replay([], K) == []
    for answer, emitted in zip(answers, drafter.replay(answers, K), strict=True):
        expected = (answer.num_tokens, K) if emitted.by_block_start else (answer.num_tokens,)
        assert emitted.probs.shape == emitted.guessed.shape == expected
        assert bool(((emitted.probs >= 0) & (emitted.probs <= 1 + TOLERANCE)).all())
        assert not bool(emitted.probs[~emitted.guessed].any()), "mass without a guess"
        if emitted.by_block_start:
            past_the_end = torch.arange(answer.num_tokens)[:, None] + torch.arange(K) >= answer.num_tokens
            assert not bool(emitted.guessed[past_the_end].any())


def check_replay_does_not_depend_on_company(drafter: Drafter, answers: Sequence[Answer]) -> None:
    if isinstance(drafter, Observer):
        return
    together = drafter.replay(answers, K)
    for answer, emitted in zip(answers, together, strict=True):
        (alone,) = drafter.replay([answer], K)
        torch.testing.assert_close(alone.probs, emitted.probs, atol=TOLERANCE, rtol=0)
        assert torch.equal(alone.guessed, emitted.guessed)


def check_replay_equals_propose(drafter: Drafter, answers: Sequence[Answer]) -> None:
    """At every block start, along the emitted text for as long as the proposal follows it.

    A drafter that learns hears of each token of each answer, in order; replay itself must teach it nothing.
    """
    for answer, emitted in zip(answers, drafter.replay(answers, K), strict=True):
        for start in range(answer.num_tokens):
            context = answer.token_ids[: answer.start + start]
            proposal = drafter.propose(context, min(K, answer.num_tokens - start), _generator(start))
            _assert_along_text(emitted, start, proposal, answer.token_ids[len(context) :])
            if isinstance(drafter, Observer):
                said = int(answer.token_ids[len(context)])
                kept = int(len(proposal) > 0 and said in proposal.token_ids[:1].tolist())
                drafter.observe(BlockOutcome(proposal, (said,), kept))


def check_draws_follow_the_law(drafter: Drafter, answers: Sequence[Answer]) -> None:
    """Frequencies of the first token stay within five standard errors of its law."""
    if drafter.law.is_greedy or isinstance(drafter, Observer):
        return
    draws, context, generator = 100, answers[0].token_ids, _generator()
    proposals = [drafter.propose(context, 1, generator) for _ in range(draws)]
    if not len(proposals[0]):
        return
    law = proposals[0].laws.probs(0, int(proposals[0].token_ids[0]))
    counts = torch.bincount(torch.cat([proposal.token_ids for proposal in proposals]), minlength=drafter.vocab_size)
    error = (law * (1 - law) / draws).sqrt() + 1 / draws
    assert bool(((counts / draws - law).abs() <= 5 * error).all())


CHECKS: tuple[Callable[[Drafter, Sequence[Answer]], None], ...] = (
    check_figures,
    check_binding_takes_the_law_or_stays_deterministic,
    check_no_tokens_asked_gives_no_guess,
    check_proposals_are_chains_or_trees_inside_the_vocabulary,
    check_greedy_laws_are_one_hot,
    check_same_generator_same_guess,
    check_replay_has_the_promised_shape,
    check_replay_does_not_depend_on_company,
    check_replay_equals_propose,
    check_draws_follow_the_law,
)


def _assert_tree(proposal: Proposal, k: int, num_nodes: int) -> None:
    """Parents first, siblings apart, at most k levels and `num_nodes` tokens."""
    assert len(proposal) <= num_nodes
    depths: list[int] = []
    for parent in proposal.parents:
        assert ROOT <= parent < len(depths)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    assert max(depths, default=0) <= k
    branches = list(zip(proposal.parents, proposal.token_ids.tolist(), strict=True))
    assert len(set(branches)) == len(branches)


def _assert_along_text(emitted: EmittedProbs, start: int, proposal: Proposal, text: Tensor) -> None:
    if not proposal.is_chain:
        _assert_down_the_tree(emitted, start, proposal, text)
        return
    for offset, token_id in enumerate(text[:K].tolist()):
        where = (start, offset) if emitted.by_block_start else (start + offset,)
        assert bool(emitted.guessed[where]) == (offset < len(proposal)), f"guess or none at {where}"
        if offset >= len(proposal):
            return
        drafted = int(proposal.token_ids[offset])
        expected = proposal.laws.probs(offset, drafted)[token_id]
        torch.testing.assert_close(emitted.probs[where], expected, atol=TOLERANCE, rtol=0, msg=f"law at {where}")
        if drafted != token_id:
            return


def _assert_down_the_tree(emitted: EmittedProbs, start: int, tree: Proposal, text: Tensor) -> None:
    """The emitted token is found among the children, one level after the other, exactly where it is there."""
    node = ROOT
    for offset, token_id in enumerate(text[:K].tolist()):
        children = {int(tree.token_ids[index]): index for index, parent in enumerate(tree.parents) if parent == node}
        assert bool(emitted.guessed[start, offset]) == bool(children), f"guess or none at {start, offset}"
        assert float(emitted.probs[start, offset]) == float(token_id in children), f"child at {start, offset}"
        if token_id not in children:
            return
        node = children[token_id]


def _assert_same(left: Proposal, right: Proposal) -> None:
    assert left.token_ids.tolist() == right.token_ids.tolist()
    assert left.parents == right.parents
    for index, token_id in enumerate(left.token_ids.tolist()):
        torch.testing.assert_close(
            left.laws.probs(index, token_id), right.laws.probs(index, token_id), atol=TOLERANCE, rtol=0
        )


def _lengths(answer: Answer) -> list[int]:
    """Lengths of contexts that grow by a few tokens, shrink and jump."""
    start, end = answer.start, len(answer.token_ids)
    return [start, min(start + 1, end), end, min(start + 3, end), max(start - 1, 1)]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
