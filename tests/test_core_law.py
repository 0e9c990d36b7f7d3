"""The sampling law: processed as transformers does, and sampled exactly."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw, law_logprobs, law_probs, sample_index, token_logprobs

LAWS = [
    SamplingLaw(0.0),
    SamplingLaw(),
    SamplingLaw(0.7),
    SamplingLaw(1.3, top_k=3),
    SamplingLaw(1.0, top_p=0.6),
    SamplingLaw(0.8, top_k=5, top_p=0.9),
]


@pytest.mark.parametrize("law", LAWS[1:], ids=str)
def test_law_is_that_of_transformers(law: SamplingLaw) -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(law.temperature)(None, logits) if law.temperature != 1 else logits
    if law.top_k:
        expected = TopKLogitsWarper(law.top_k)(None, expected)
    if law.top_p < 1:
        expected = TopPLogitsWarper(law.top_p)(None, expected)
    torch.testing.assert_close(law_probs(logits, law), expected.softmax(-1))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws_sum_to_one_and_agree_with_their_logarithms(law: SamplingLaw) -> None:
    logits = torch.randn(30, 12, generator=torch.Generator().manual_seed(1))
    probs = law_probs(logits, law)
    torch.testing.assert_close(probs.sum(-1), torch.ones(30))
    torch.testing.assert_close(law_logprobs(logits, law).exp(), probs)
    tokens = torch.arange(30) % 12
    torch.testing.assert_close(token_logprobs(logits, tokens, law).exp(), probs[torch.arange(30), tokens])


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert law_probs(torch.tensor([1.0, 2.0, 2.0]), SamplingLaw(0.0)).tolist() == [0.0, 1.0, 0.0]


def test_removed_tokens_stay_removed() -> None:
    logits = torch.tensor([0.0, float("-inf"), 1.0])
    assert law_probs(logits, SamplingLaw(2.0))[1] == 0.0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other processes may take a second
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_sampling_inverts_the_cumulative_law(weights: list[float], uniform: float) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    if probs.sum() < 1e-6:
        return
    probs = (probs / probs.sum()).float()
    token = sample_index(probs, uniform)
    assert probs[token] > 0
    below, through = probs[:token].double().sum(), probs[: token + 1].double().sum()
    assert below <= uniform + 1e-6
    assert uniform <= through + 1e-6


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}])
def test_impossible_laws_are_refused(bad: dict) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplingLaw(**bad)
