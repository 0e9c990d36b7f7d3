"""Factors shared with the target: U is its own and never moves, V learns, and what is saved is a plain model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft import compressing, trainings, verbs
from foredraft.checkpoint import read_manifest
from foredraft.core.errors import ModelError
from foredraft.distill.data import read_groups
from foredraft.distill.init.shared import SharedLinear, bytes_beside_target, fold_factors, share_factors
from foredraft.distill.losses import forward_kl
from foredraft.distill.student import Student
from foredraft.models.draft import Draft, load_draft
from foredraft.models.layers import keep_layers, layer_stack
from foredraft.steps import DistillStep, InitStep, PruneStep
from tests.distilling import tiny_target, written_trace
from tests.tiny import tiny_model

TOKENS = torch.tensor([[5, 90, 17, 200, 33, 1, 64]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def factors(model: PreTrainedModel) -> list[SharedLinear]:
    return [module for module in model.modules() if isinstance(module, SharedLinear)]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_rank_is_the_identity(family: str) -> None:
    target = tiny_model(family=family)
    shared = share_factors(target, target, range(4), 64)
    assert len(factors(shared)) == 28
    torch.testing.assert_close(logits(shared), logits(target), rtol=1e-3, atol=1e-3)
    folded = fold_factors(shared)
    assert not factors(folded)
    torch.testing.assert_close(logits(folded), logits(target), rtol=1e-3, atol=1e-3)


def test_a_low_rank_is_the_nearest_matrix_of_that_rank() -> None:
    target = tiny_model(num_layers=1)
    (shared,) = [f for f in factors(share_factors(target, target, [0], 5)) if f.weight.shape[1] == 64]
    product, whole = (shared.basis @ shared.weight).detach(), layer_stack(target)[0].mlp.down_proj.weight.detach()
    lost = torch.linalg.svdvals(whole)[5:].square().sum()
    torch.testing.assert_close((product - whole).square().sum(), lost, rtol=1e-4, atol=1e-5)


def test_factoring_what_was_folded_changes_nothing() -> None:
    target = tiny_model(num_layers=2)
    shared = share_factors(target, target, [0, 1], 6)
    with torch.no_grad():
        for factor in factors(shared):
            factor.weight.mul_(1.5)
    once = logits(shared)
    again = share_factors(fold_factors(shared), target, [0, 1], 6)
    torch.testing.assert_close(logits(again), once, rtol=1e-3, atol=1e-3)


def test_only_the_factor_of_the_draft_is_trained(tmp_path: Path) -> None:
    target = tiny_model(family="qwen2")
    before = {name: value.clone() for name, value in target.state_dict().items()}
    draft = Draft(share_factors(keep_layers(target, [0, 3]), target, [0, 3], 4))
    student = Student.of(draft)
    matrices = {name: weight for name, weight in student.weights.items() if weight.dim() > 1}
    assert len(matrices) == 14
    assert all(weight.shape[0] == 4 for weight in matrices.values())
    student.backward(read_groups([written_trace(tmp_path / "t", target, 4)]), forward_kl)
    assert all(bool(weight.grad.abs().sum() > 0) for weight in matrices.values())
    assert all(factor.basis.grad is None and not factor.basis.requires_grad for factor in factors(student.model))
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_shared_draft_is_trained_within_its_factors_and_saved_as_a_plain_model(tmp_path: Path) -> None:
    target = tiny_target()
    traces = [written_trace(tmp_path / "t", target.model, 8)]
    fingerprint = {name: value.clone() for name, value in target.model.state_dict().items()}
    verbs.init_draft(target, traces, InitStep(layers="0,3", share_rank=4), tmp_path / "a")
    shared = read_manifest(tmp_path / "a").options["shared"]
    assert (shared["layers"], shared["rank"]) == ([0, 3], 4)
    step = DistillStep(tokens=320, batch_tokens=40, learning_rate=1e-2)
    trainings.distill_draft(tmp_path / "a", target, traces, step, tmp_path / "b")
    assert read_manifest(tmp_path / "b").options["shared"] == shared
    before, after = load_draft(tmp_path / "a", "float32").model, load_draft(tmp_path / "b", "float32").model
    for number, layer in zip((0, 3), layer_stack(after), strict=True):
        theirs = layer_stack(target.model)[number].mlp.up_proj.weight
        basis = torch.linalg.svd(theirs).U[:, :4]
        weight = layer.mlp.up_proj.weight
        torch.testing.assert_close(basis @ (basis.T @ weight), weight, rtol=1e-3, atol=1e-4)
    assert (layer_stack(after)[0].mlp.up_proj.weight - layer_stack(before)[0].mlp.up_proj.weight).abs().max() > 1e-3
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    torch.testing.assert_close(logits(stock), logits(after))
    assert {*stock.config.to_dict()} - {"dtype"} == {*target.model.config.to_dict()} - {"dtype"}
    assert all(torch.equal(value, fingerprint[name]) for name, value in target.model.state_dict().items())


def test_the_bytes_beside_the_target_are_those_of_v_biases_and_norms() -> None:
    target = tiny_model(num_layers=1, family="qwen2")
    shared = share_factors(target, target, [0], 3)
    inputs = 32 * 4 + 32 + 32 + 64  # q, k, v, gate and up read 32 channels, o 32, down 64
    vectors = 32 + 16 + 16 + 3 * 32  # biases of q, k and v, three norms
    assert bytes_beside_target(shared) == 4 * (3 * inputs + vectors)
    twice = bytes_beside_target(share_factors(target, target, [0], 6))
    assert twice - bytes_beside_target(shared) == 4 * 3 * inputs


def test_cutting_a_shared_draft_ends_the_sharing(tmp_path: Path) -> None:
    target = tiny_target()
    traces = [written_trace(tmp_path / "t", target.model, 4)]
    verbs.init_draft(target, traces, InitStep(layers="0,1,3", share_rank=4), tmp_path / "a")
    compressing.prune_draft(tmp_path / "a", target, traces, PruneStep(), tmp_path / "b")
    assert "shared" not in read_manifest(tmp_path / "b").options
    trainings.distill_draft(tmp_path / "b", target, traces, DistillStep(tokens=40), tmp_path / "c")


def test_factors_of_other_shapes_are_refused() -> None:
    with pytest.raises(ModelError, match="in a draft of the target.s own width"):
        share_factors(tiny_model(num_layers=1), tiny_model(num_layers=1, hidden=40), [0], 4)
