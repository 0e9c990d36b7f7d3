"""Inverse-CDF sampling: exact intervals, whatever the blocks."""

import pytest
import torch

from foredraft.core.law import sample_index, sample_indices


def _one_by_one(probs: torch.Tensor, uniform: float) -> int:
    """The definition: the first token whose cumulative mass passes uniform times the total."""
    cumulative = probs.double().cumsum(0)
    return int((cumulative > uniform * cumulative[-1]).nonzero()[0])


@pytest.mark.parametrize("vocab_size", [3, 127, 128, 129, 1000])
def test_sampling_equals_its_definition(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    probs = torch.rand(64, vocab_size, generator=generator) ** 4
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    expected = [_one_by_one(row, float(uniform)) for row, uniform in zip(probs, uniforms, strict=True)]
    assert sample_indices(probs, uniforms).tolist() == expected
    assert [sample_index(row, float(uniform)) for row, uniform in zip(probs, uniforms, strict=True)] == expected


@pytest.mark.parametrize(
    ("uniform", "token_id"), [(0.0, 5), (0.25, 200), (0.5, 201), (0.75, 201), (1.0 - 2.0**-53, 201)]
)
def test_tokens_without_mass_are_never_drawn(uniform: float, token_id: int) -> None:
    probs = torch.zeros(400)
    probs[[5, 200, 201]] = torch.tensor([0.25, 0.25, 0.5])
    assert sample_index(probs, uniform) == token_id


def test_even_uniforms_reproduce_the_law() -> None:
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = sample_indices(probs.expand(1000, -1), uniforms).bincount(minlength=4)
    torch.testing.assert_close(counts / 1000, probs, atol=1e-3, rtol=0)
