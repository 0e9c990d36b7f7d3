"""Laws of matrices of lower rank."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from foredraft.compress.low_rank import cut_ranks, low_rank_factors
from foredraft.compress_tables import rank_table
from foredraft.core.errors import RecipeError
from foredraft.core.protocols import Answer
from foredraft.factoring import low_rank_draft
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import load_target
from foredraft.steps import LowRankStep
from tests.test_compress_probe import made_trace
from tests.tiny import save_tiny, tiny_model


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


def test_each_column_of_one_factor_is_as_long_as_its_row_of_the_other() -> None:
    """However many positions were read: a learning rate must suit both."""
    weight, x = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)), inputs(12)
    outer, inner = low_rank_factors(weight, 1000 * x.T @ x, 4)
    torch.testing.assert_close(outer.norm(dim=0), inner.norm(dim=1), rtol=1e-3, atol=1e-6)
    outer, inner = low_rank_factors(torch.zeros(20, 12), x.T @ x, 4)
    assert bool((outer == 0).all())
    assert bool(inner.isfinite().all())


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
        assert int(torch.linalg.matrix_rank(draft.model.model.layers[1].mlp.up_proj.product(), rtol=1e-4)) == rank
    assert errors[0] < 1e-6 < errors[1] < errors[2]
    assert torch.equal(model(tokens).logits, before)


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(RecipeError, match="no unit 'layers.9.o'"):
        cut_ranks(Draft(tiny_model()), {"layers.9.o": 4}, [])
    with pytest.raises(RecipeError, match="rank 33 of layers.0.o is none: it has ranks from 1 to 32"):
        cut_ranks(Draft(tiny_model()), {"layers.0.o": 33}, [])


@pytest.mark.parametrize("by", ["inputs", "weights"])
def test_the_step_writes_a_plain_draft_and_says_what_factors_would_take(by: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    save_draft(Draft(tiny_model()), tmp_path / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    trace = made_trace(tmp_path / "trace", tokenizer_fingerprint=target.tokenizer_fingerprint)
    step = LowRankStep(units="layers.*.down", share=0.5, by=by)
    manifest = low_rank_draft(tmp_path / "draft", target, [trace], step, tmp_path / "out")
    cuts = manifest.options["low_rank"]
    assert [cut["module"] for cut in cuts] == [f"model.layers.{layer}.mlp.down_proj" for layer in range(4)]
    # 32 outputs, 64 inputs: 10 * (32 + 64) = 960 of 2048 weights, and 11 * 96 would be more than half.
    assert all((cut["rank"], cut["parameters"], cut["dense"]) == (10, 960, 2048) for cut in cuts)
    model, before = (load_draft(tmp_path / name, "float32").model for name in ("out", "draft"))
    for layer in range(4):
        assert int(torch.linalg.matrix_rank(model.model.layers[layer].mlp.down_proj.weight, rtol=1e-4)) == 10
        assert torch.equal(model.model.layers[layer].mlp.up_proj.weight, before.model.layers[layer].mlp.up_proj.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    shown = StringIO()
    Console(file=shown, width=200).print(rank_table(cuts, "out", step.form))
    assert "8,192" in shown.getvalue()
    assert "As factors (form=factored) they would be 3,840, 47%." in shown.getvalue()


def test_the_inputs_choose_better_than_the_weights_alone(tmp_path: Path) -> None:
    model, sample = tiny_model(hidden=64), calibration_batches(answers())
    ranks = {f"layers.{layer}.gate_up": 8 for layer in range(4)}
    errors = []
    for batches in (sample, []):
        cut, _ = cut_ranks(Draft(model), ranks, batches)
        batch = sample[0]
        with torch.no_grad():
            lost = cut.model(batch.token_ids).logits - model(batch.token_ids).logits
        errors.append(float(lost[batch.read].square().mean()))
    assert errors[0] < 0.9 * errors[1]


def test_a_pattern_that_matches_nothing_and_two_budgets_are_refused(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    with pytest.raises(RecipeError, match="the pattern 'layers.*.dwon' matches no unit"):
        low_rank_draft(tmp_path / "target", target, [], LowRankStep(units="layers.*.dwon", rank=2), tmp_path / "out")
    with pytest.raises(ValidationError, match="give either rank or share"):
        LowRankStep(rank=2, share=0.5)
