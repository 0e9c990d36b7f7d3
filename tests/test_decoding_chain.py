"""Losslessness of the chain rule and of the loop around it, by exact enumeration."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.core.law import GREEDY, SamplingLaw, law_probs, sample_index
from foredraft.core.proposal import Laws, Proposal
from foredraft.decoding import speculative
from foredraft.decoding.rules import check_proposal, verify_chain
from foredraft.decoding.speculative import Limits, decode, plain_decode
from tests.enumeration import exact_law
from tests.toys import Lookup, MarkovDrafter, MarkovSession, sequence_law

# Rows by the token before. All ratios and residuals are sixths with DENSE, twelfths with SURE.
TARGET = torch.tensor([[1 / 2, 1 / 3, 1 / 6], [1 / 6, 1 / 2, 1 / 3], [1 / 3, 1 / 3, 1 / 3]])
DENSE = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0], [2 / 3, 1 / 6, 1 / 6]])
SURE = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
# Halves and quarters over two tokens keep whole decoding runs enumerable.
HALVES = (torch.tensor([[1 / 2, 1 / 2], [0, 1]]), torch.tensor([[1.0, 0], [1 / 2, 1 / 2]]), 2)
QUARTERS = (torch.tensor([[1 / 4, 3 / 4], [1 / 2, 1 / 2]]), torch.tensor([[1 / 2, 1 / 2], [1, 0]]), 4)


def emitted_law(target: Float[Tensor, "3 3"], draft: Float[Tensor, "3 3"], one_hot: bool, k: int) -> dict:
    """Return the exact law of the first k + 1 tokens after token 0: one block, then the target itself."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted in product(range(3), repeat=k):
        before = [0, *drafted]
        drawn = float(draft[before[:-1], drafted].prod())
        if drawn == 0.0:
            continue
        laws = Laws.one_hot(k, 3) if one_hot else Laws.from_dense(draft[before[:-1]])
        proposal = Proposal.chain(torch.tensor(drafted), laws)
        verdicts = exact_law(
            lambda uniform, *block: verify_chain(*block, uniform), 12 if one_hot else 6, target[before], proposal
        )
        for verdict, mass in verdicts.items():
            emitted = (*drafted[: verdict.num_accepted], verdict.next_token)
            for rest in product(range(3), repeat=k - verdict.num_accepted):
                path = [emitted[-1], *rest]
                law[(*emitted, *rest)] += drawn * float(mass) * float(target[path[:-1], path[1:]].prod())
    return {answer: mass for answer, mass in law.items() if mass > 0.0}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("draft", ["dense", "one-hot"])
def test_a_chain_block_keeps_the_targets_law_exactly(draft: str, k: int) -> None:
    table = DENSE if draft == "dense" else SURE
    found = emitted_law(TARGET, table, draft == "one-hot", k)
    wanted = sequence_law(MarkovSession(TARGET.log()), torch.tensor([0]), SamplingLaw(), k + 1)
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("law", "logits"),
    [
        (GREEDY, [0.3, 0.5, 0.2]),
        (SamplingLaw(temperature=2.0), [1.0, 9.0, 4.0]),
        (SamplingLaw(top_k=2), [3.0, 3.0, 1.0]),
        (SamplingLaw(top_p=0.7), [0.25, 0.5, 0.15]),
    ],
)
def test_a_chain_block_keeps_processed_laws_exactly(law: SamplingLaw, logits: list[float]) -> None:
    target = law_probs(torch.tensor(logits).log().expand(3, 3), law)
    found = emitted_law(target, DENSE, False, 1)
    wanted = {
        (a, b): float(target[0, a] * target[0, b])
        for a in range(3)
        for b in range(3)
        if target[0, a] * target[0, b] > 0
    }
    assert found == pytest.approx(wanted, abs=1e-6)


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    def run(uniform: Callable[[], float]) -> int:
        token = sample_index(DENSE[2], uniform())
        proposal = Proposal.chain(torch.tensor([token]), Laws.from_dense(DENSE[2:]))
        return verify_chain(TARGET[[2, token]], proposal, uniform).num_accepted

    assert float(exact_law(run, 6)[1]) == pytest.approx(float(torch.minimum(TARGET[2], DENSE[2]).sum()))


def test_equal_laws_reject_nothing() -> None:
    for token in range(3):
        proposal = Proposal.chain(torch.tensor([token]), Laws.from_dense(TARGET[:1]))
        assert verify_chain(TARGET[[0, token]], proposal, lambda: 1 - 2**-53).num_accepted == 1


def test_no_guess_still_emits_one_token() -> None:
    law = exact_law(lambda uniform: verify_chain(TARGET[:1], Proposal.empty(3), uniform).next_token, 6)
    assert [float(law[token]) for token in range(3)] == pytest.approx(TARGET[0].tolist())


@pytest.mark.parametrize(
    ("tables", "temperature", "k", "length"),
    [(HALVES, 1.0, 1, 3), (HALVES, 1.0, 2, 2), (HALVES, 0.0, 2, 3), (QUARTERS, 1.0, 1, 1)],
)
def test_the_whole_loop_keeps_the_targets_law_exactly(
    tables: tuple[Tensor, Tensor, int], temperature: float, k: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, grid = tables
    law, session = SamplingLaw(temperature), MarkovSession(target.log())

    def run(uniform: Callable[[], float]) -> tuple[int, ...]:
        monkeypatch.setattr(speculative, "uniforms", lambda generator: uniform)
        drafter = MarkovDrafter(draft.log(), uniform=uniform)
        return tuple(
            decode(session, drafter, torch.tensor([0]), law, k, Limits(length), torch.Generator()).token_ids.tolist()
        )

    found = {answer: float(mass) for answer, mass in exact_law(run, grid).items()}
    assert found == pytest.approx(sequence_law(session, torch.tensor([0]), law, length), abs=1e-6)


@pytest.mark.parametrize("stop_ids", [(), (1,)])
def test_a_copying_drafter_keeps_the_targets_law_exactly(
    stop_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, prompt = MarkovSession(HALVES[0].roll(1, 1).log()), torch.tensor([0, 0, 1, 0])

    def run(uniform: Callable[[], float]) -> tuple[int, ...]:
        monkeypatch.setattr(speculative, "uniforms", lambda generator: uniform)
        limits = Limits(3, stop_ids)
        return tuple(decode(session, Lookup(2), prompt, SamplingLaw(), 3, limits, torch.Generator()).token_ids.tolist())

    found = {answer: float(mass) for answer, mass in exact_law(run, 2).items()}
    assert found == pytest.approx(sequence_law(session, prompt, SamplingLaw(), 3, stop_ids), abs=1e-6)


@pytest.mark.slow
def test_samples_follow_the_targets_law_by_chi_square() -> None:
    generator, prompt, runs = torch.Generator().manual_seed(5), torch.tensor([1]), 300
    session = MarkovSession(torch.randn(3, 3, generator=generator))
    drafter = MarkovDrafter(torch.randn(3, 3, generator=generator))
    wanted = sequence_law(session, prompt, SamplingLaw(), 2)
    counts = dict.fromkeys(wanted, 0)
    for _ in range(runs):
        counts[tuple(decode(session, drafter, prompt, SamplingLaw(), 2, Limits(2), generator).token_ids.tolist())] += 1
    chi_square = sum((counts[answer] - runs * mass) ** 2 / (runs * mass) for answer, mass in wanted.items())
    assert chi_square < 26.1  # 99.9 % point of 8 degrees of freedom


def test_greedy_decoding_equals_plain_decoding() -> None:
    session = MarkovSession(torch.randn(25, 5, generator=torch.Generator().manual_seed(1)), order=2)
    prompt, limits = torch.tensor([1, 2, 3]), Limits(30, stop_ids=(9,))
    plain = plain_decode(session, prompt, GREEDY, limits, torch.Generator())
    for drafter in (Lookup(5), MarkovDrafter(torch.randn(5, 5)), MarkovDrafter(session.table, GREEDY, order=2)):
        for k in (0, 1, 4):
            decoded = decode(session, drafter, prompt, GREEDY, k, limits, torch.Generator().manual_seed(k))
            assert decoded.token_ids.tolist() == plain.token_ids.tolist()
            assert sum(block.emitted for block in decoded.blocks) == len(plain.token_ids)
    assert decoded.target_calls < plain.target_calls == len(plain.token_ids)


def test_counts_stop_at_the_end_of_the_answer() -> None:
    session = MarkovSession(torch.eye(3).roll(1, 1) * 50)  # 0 -> 1 -> 2 -> 0
    decoded = decode(
        session, MarkovDrafter(session.table, GREEDY), torch.tensor([0]), GREEDY, 4, Limits(9, (2,)), torch.Generator()
    )
    assert decoded.token_ids.tolist() == [1, 2]
    assert decoded.finish_reason == "stop"
    (block,) = decoded.blocks
    assert (block.drafted, block.examined, block.accepted, block.emitted) == (4, 2, 2, 2)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (Proposal.certain(torch.tensor([3]), 3), "token 3; the target's ids end at 2"),
        (Proposal.certain(torch.tensor([-1]), 3), "token -1"),
        (Proposal.certain(torch.tensor([0, 1, 2]), 3), "3 tokens where at most 2"),
        (Proposal.chain(torch.tensor([0]), Laws.from_dense(torch.full((1, 3), 0.3))), "sums to 0.9"),
        (Proposal.chain(torch.tensor([0]), Laws.from_dense(torch.full((1, 3), torch.nan))), "sums to nan"),
        (Proposal.chain(torch.tensor([0]), Laws.from_dense(torch.full((1, 4), 0.25))), "4 tokens wide"),
    ],
)
def test_a_broken_proposal_is_refused(proposal: Proposal, message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        check_proposal(proposal, 2, 3)
