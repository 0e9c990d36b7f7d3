"""Planted bugs: each must be caught by the check that is named beside it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.law import SamplingLaw, law_probs
from foredraft.core.proposal import Proposal
from foredraft.decoding import rules, speculative, stopping, trees
from foredraft.decoding.rules import Uniform, Verdict
from foredraft.models.kv_cache import KeyValueCache
from tests import test_decoding_lossless as checks
from tests.test_decoding_lossless import WAYS, assert_lossless
from tests.test_decoding_models import assert_greedy_equals_transformers

honest_residual = rules.residual


def top_k_residual(target: Float[Tensor, " vocab"], draft: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    rest = honest_residual(target, draft)
    return torch.where(target >= target.topk(2).values[-1], rest, 0.0)


def plain_ratio(logits: Tensor, law: SamplingLaw) -> Tensor:
    return law_probs(logits, SamplingLaw())


def without_bonus(target: Tensor, proposal: Proposal, uniform: Uniform) -> Verdict:
    verdict = rules.verify_chain(target, proposal, uniform)
    if verdict.num_accepted == len(proposal) > 0:
        return Verdict(len(proposal) - 1, int(proposal.token_ids[-1]))
    return verdict


def target_as_residual(target: Tensor, draft: Tensor) -> Tensor:
    return target


def test_a_top_k_residual_changes_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "residual", top_k_residual)
    with pytest.raises(AssertionError):
        assert_lossless(WAYS["tree of draws without replacement"], monkeypatch)
    monkeypatch.setattr(rules, "residual", top_k_residual)
    with pytest.raises(AssertionError):
        assert_lossless(WAYS["wide chain"], monkeypatch)


@pytest.mark.parametrize("name", ["chain", "block", "cascade"])
def test_a_residual_that_is_the_target_changes_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "residual", target_as_residual)
    with pytest.raises(AssertionError):
        assert_lossless(WAYS[name], monkeypatch)


def test_a_missing_bonus_token_is_seen_in_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "verify_chain", without_bonus)
    with pytest.raises(AssertionError):
        checks.test_a_draft_equal_to_the_target_emits_k_plus_one_tokens_a_call()


@pytest.mark.parametrize("name", ["chain, target at another temperature", "chain, target of the two best tokens"])
def test_a_ratio_under_another_law_changes_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "law_probs", plain_ratio)
    with pytest.raises(AssertionError):
        assert_lossless(WAYS[name], monkeypatch)


def test_a_token_thrown_away_by_its_value_changes_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "confidence", lambda law, token_id: float(law[token_id]))
    with pytest.raises(AssertionError):
        assert_lossless(WAYS["stop by confidence"], monkeypatch)


def test_going_on_after_a_rejection_changes_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_of_two(law: Tensor, proposal: Proposal, index: int, token_id: int, honest: Callable) -> float:
        return 1.0 - (1.0 - honest(law, proposal, index, token_id)) ** 2

    monkeypatch.setattr(rules, "acceptance_probability", partial(best_of_two, honest=rules.acceptance_probability))
    with pytest.raises(AssertionError):
        assert_lossless(WAYS["chain"], monkeypatch)


def test_a_cache_that_is_not_cropped_after_a_rejection_changes_the_text(
    tiny_target_folder: Path, tiny_draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyValueCache, "crop", lambda cache, length: None)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_greedy_equals_transformers(tiny_target_folder, tiny_draft_folder)
