"""Laws of matrices of lower rank."""

import pytest
import torch

from foredraft.compress.low_rank import cut_ranks, low_rank_factors
from foredraft.core.errors import RecipeError
from foredraft.core.protocols import Answer
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft
from tests.tiny import tiny_model


def inputs(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(300, count, generator=generator) @ torch.randn(count, count, generator=generator)


def answers() -> list[Answer]:
    generator = torch.Generator().manual_seed(5)
    return [Answer(torch.randint(3, 259, (30 + n,), generator=generator), start=6) for n in range(4)]


def test_without_correlation_it_is_the_truncated_decomposition() -> None:
    weight = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))
    left, right = low_rank_factors(weight, torch.eye(12) * 5, 4)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    assert torch.allclose(left @ right, u[:, :4] * s[:4] @ v[:4], atol=1e-5)


def test_no_matrix_of_that_rank_is_nearer_on_the_inputs() -> None:
    """The best outputs of rank r are the truncated decomposition of the outputs (Eckart and Young)."""
    weight, x = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)), inputs(12)
    left, right = low_rank_factors(weight, x.T @ x, 4)
    lost = (x @ (left @ right - weight).T).square().sum()
    outputs = torch.linalg.svdvals(x @ weight.T)
    assert lost == pytest.approx(float(outputs[4:].square().sum()), rel=1e-2)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    assert lost < 0.8 * (x @ ((u[:, :4] * s[:4] @ v[:4]) - weight).T).square().sum()


@torch.no_grad()
def test_full_rank_is_the_identity_and_less_errs_more() -> None:
    model, batches = tiny_model(), calibration_batches(answers())
    tokens = torch.arange(3, 40)[None]
    before = model(tokens).logits
    errors = []
    for rank in (32, 16, 4):
        draft, cuts = cut_ranks(Draft(model), {"layers.1.gate_up": rank}, batches)
        errors.append(float((draft.model(tokens).logits - before).square().mean()))
        assert [cut.module for cut in cuts] == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
        assert all(cut.parameters == rank * (64 + 32) for cut in cuts)
        assert int(torch.linalg.matrix_rank(draft.model.model.layers[1].mlp.up_proj.weight, rtol=1e-4)) == rank
    assert errors[0] < 1e-6 < errors[1] < errors[2]
    assert torch.equal(model(tokens).logits, before)


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(RecipeError, match="no unit 'layers.9.o'"):
        cut_ranks(Draft(tiny_model()), {"layers.9.o": 4}, [])
    with pytest.raises(RecipeError, match="rank 33 of layers.0.o is none: it has ranks from 1 to 32"):
        cut_ranks(Draft(tiny_model()), {"layers.0.o": 33}, [])
