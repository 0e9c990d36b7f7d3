"""The n-gram law against its formulas, merging of counts, and hybrids with a neural drafter."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CapabilityError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.progress import SILENT
from foredraft.core.protocols import EXACT, TOKENS_EXACT, Answer, Drafter
from foredraft.decoding.stopping import confident
from foredraft.decoding.trees import tree
from foredraft.ngram.corpus import joined
from foredraft.ngram.counts import NgramCounts, count_ngrams, merged
from foredraft.ngram.hybrid import FirstGuess, Mixture, fitted_shares, mixture
from foredraft.ngram.law import BACKOFF, DISCOUNT, UNSEEN, build_ngram_law, load_ngram_law, ngram_law, updated
from foredraft.ngram.prompt_lookup import PromptLookup
from foredraft.ngram.traffic import traffic_drafter
from foredraft.steps import NgramStep
from tests.contract_drafter import check_drafter

VOCAB = 7
GENERATOR = torch.Generator()


def texts(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, size).astype(np.int32) for size in (40, 2, 25)]


def counted(sequences: list[np.ndarray], order: int = 3) -> NgramCounts:
    return count_ngrams(*joined(sequences, VOCAB), order, 1)


def followers(sequences: list[np.ndarray], context: tuple[int, ...]) -> Counter[int]:
    size = len(context)
    return Counter(
        int(text[end])
        for text in sequences
        for end in range(size, len(text))
        if tuple(text[end - size : end].tolist()) == context
    )


def brute_law(sequences: list[np.ndarray], context: list[int], smoothing: str) -> list[float]:
    seen = followers(sequences, ())
    law = [(1 - UNSEEN) * seen[token] / seen.total() + UNSEEN / VOCAB for token in range(VOCAB)]
    for size in range(1, min(3, len(context)) + 1):
        seen = followers(sequences, tuple(context[-size:]))
        if not seen:
            break
        total, left = seen.total(), DISCOUNT * len(seen) / seen.total()
        if smoothing == "interpolated":
            law = [max(seen[token] - DISCOUNT, 0) / total + left * law[token] for token in range(VOCAB)]
        else:
            law = [seen[token] / total if token in seen else BACKOFF * law[token] for token in range(VOCAB)]
    return [value / sum(law) for value in law]


@pytest.mark.parametrize("smoothing", ["interpolated", "stupid-backoff"])
def test_the_law_is_that_of_its_formula_and_sums_to_one(smoothing: str) -> None:
    sequences = texts(1)
    drafter = ngram_law(VOCAB, counted(sequences), smoothing)
    text = np.random.default_rng(2).integers(0, VOCAB, 30)
    for end in range(1, len(text)):
        proposal = drafter.propose(torch.from_numpy(text[:end]), 2, GENERATOR)
        law = proposal.laws.probs(0, 0)
        torch.testing.assert_close(law, torch.tensor(brute_law(sequences, text[:end].tolist(), smoothing)))
        assert float(law.sum()) == pytest.approx(1.0)
        assert float(law.min()) > 0.0


def test_merged_counts_are_those_of_all_text_at_once() -> None:
    whole = counted(texts(1) + texts(2) + texts(3))
    parts = merged([counted(texts(1)), counted(texts(2)), counted(texts(3))])
    for left, right in zip(whole.arrays, parts.arrays, strict=True):
        assert np.array_equal(left, right)


def test_an_update_is_the_law_of_all_text() -> None:
    context = torch.tensor([1, 2, 3])
    later = updated(ngram_law(VOCAB, counted(texts(1)), "interpolated"), texts(2))
    whole = ngram_law(VOCAB, counted(texts(1) + texts(2)), "interpolated")
    assert torch.equal(*(law.propose(context, 1, GENERATOR).laws.probs(0, 0) for law in (later, whole)))


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    text = torch.from_numpy(np.random.default_rng(4).integers(0, VOCAB, 30))
    return [Answer(text, 4), Answer(text[:9], 8)]


@pytest.mark.parametrize("smoothing", ["interpolated", "stupid-backoff"])
def test_a_built_law_holds_the_drafter_contract(smoothing: str, answers: list[Answer], tmp_path: Path) -> None:
    settings = NgramStep(kind="ngram-law", order=3, smoothing=smoothing)
    manifest = DraftManifest("ngram-law", VOCAB, "t", "t", "v")
    build_ngram_law(texts(1), VOCAB, settings, manifest, tmp_path / "draft", SILENT)
    check_drafter(load_ngram_law(tmp_path / "draft"), answers)


def neural() -> Drafter:
    """A drafter with dense laws and another opinion stands for a model."""
    return ngram_law(VOCAB, counted(texts(9), order=1), "interpolated")


BY_LENGTH, EVEN, ONE = (0.0, 0.2, 0.6, 0.9), (0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [BY_LENGTH, EVEN, ONE])
def test_a_mixture_holds_the_drafter_contract(shares: tuple[float, ...], answers: list[Answer]) -> None:
    check_drafter(Mixture(ngram_law(VOCAB, counted(texts(1)), "interpolated"), neural(), shares), answers)


@pytest.mark.parametrize("shares", [BY_LENGTH, pytest.param(ONE, marks=pytest.mark.slow)])
def test_a_mixture_with_guesses_that_may_be_missing_holds_the_drafter_contract(
    shares: tuple[float, ...], answers: list[Answer]
) -> None:
    """Certain guesses, by block start, at some positions only: the n-gram law is alone at the others."""
    lookup = PromptLookup(VOCAB, max_match=3, min_match=2)
    mixed = Mixture(ngram_law(VOCAB, counted(texts(1)), "interpolated"), lookup, shares)
    check_drafter(mixed, answers)
    assert len(mixed.bind(SamplingLaw()).propose(torch.empty(0, dtype=torch.long), 2, GENERATOR)) == 2


def test_first_guess_is_as_exact_as_its_parts() -> None:
    doubtful = confident(neural(), lambda spec: neural())
    assert FirstGuess(PromptLookup(VOCAB), neural()).validity == EXACT
    assert FirstGuess(PromptLookup(VOCAB), doubtful).validity == TOKENS_EXACT


@pytest.mark.slow
def test_first_guess_holds_the_drafter_contract(answers: list[Answer]) -> None:
    check_drafter(FirstGuess(PromptLookup(VOCAB, max_match=3, min_match=2), neural()), answers)
    check_drafter(FirstGuess(neural(), PromptLookup(VOCAB)), answers)


def test_a_mixture_lies_between_its_parts() -> None:
    ours, theirs, context = ngram_law(VOCAB, counted(texts(1)), "interpolated"), neural(), torch.tensor([1, 2])
    laws = [
        drafter.bind(SamplingLaw()).propose(context, 1, GENERATOR).laws.probs(0, 0)
        for drafter in (ours, theirs, Mixture(ours, theirs, (0.25,) * 4))
    ]
    torch.testing.assert_close(laws[2], 0.25 * laws[0] + 0.75 * laws[1])


def test_fitted_shares_accept_at_least_as_much_as_any_fixed_share() -> None:
    generator = torch.Generator().manual_seed(0)
    ngram_probs, neural_probs, target_probs = torch.rand(3, 500, generator=generator).unbind()
    lengths = torch.randint(0, 3, (500,), generator=generator)

    def acceptance(shares: tuple[float, ...]) -> float:
        share = torch.tensor(shares)[lengths]
        mixed = share * ngram_probs + (1 - share) * neural_probs
        return float((mixed / target_probs).clamp(max=1.0).mean())

    fitted = fitted_shares(ngram_probs, neural_probs, target_probs, lengths, 3)
    assert len(fitted) == 4
    assert fitted[3] == fitted[2]
    for share in torch.linspace(0, 1, 11).tolist():
        assert acceptance(fitted) >= acceptance((share,) * 4) - 1e-6


def test_impossible_hybrids_are_refused() -> None:
    ours = ngram_law(VOCAB, counted(texts(1)), "interpolated")
    with pytest.raises(UserError, match="needs 4 shares"):
        Mixture(ours, neural(), (0.5,))
    for branching_or_learning in (tree(neural(), lambda spec: neural()), traffic_drafter(VOCAB)):
        with pytest.raises(CapabilityError, match="grows trees or learns"):
            mixture(branching_or_learning, lambda spec: ours, ngram="law")
    with pytest.raises(VocabMismatchError, match="speak 7 and 9 tokens"):
        FirstGuess(ours, PromptLookup(9))
    assert Mixture(ours, neural(), (0.5,) * 4).bind(GREEDY).law == GREEDY
