"""Laws of rounding on a draft's own inputs."""

import pytest
import torch
from torch import Tensor

from foredraft.compress.gptq import GptqRounder, gptq_round, inverse_factor
from foredraft.compress.plan import unit_formats
from foredraft.compress.prefix import read_prefix, run_from
from foredraft.compress.quantize import quantize, round_to_nearest
from foredraft.compress.rounding import product
from foredraft.core.errors import UserError
from foredraft.core.protocols import Answer
from foredraft.models.calibration import calibration_batches
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.layers import layer_stack
from foredraft.models.units import search_units
from tests.tiny import tiny_model

FORMATS = [WeightFormat(4, 32), WeightFormat(4, 16), WeightFormat(8, 0)]


def answers(count: int = 6) -> list[Answer]:
    generator = torch.Generator().manual_seed(5)
    return [Answer(torch.randint(3, 259, (30 + n,), generator=generator), start=6 + n) for n in range(count)]


def correlated(inputs: int, positions: int = 400, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator)
    return torch.randn(positions, inputs, generator=generator) @ mix


def obq_reference(weight: Tensor, hessian: Tensor, chosen: WeightFormat) -> Tensor:
    """Return the rounded weight by the definition: after each column the inverse of what remains is taken anew."""
    damped = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))).double()
    left, group = weight.double().clone(), chosen.group or weight.shape[1]
    low = -(2 ** (chosen.bits - 1))
    scale = round_to_nearest("", weight, chosen)[1].double()[:, :1]
    for column in range(weight.shape[1]):
        if chosen.group and column % group == 0:
            scale = round_to_nearest("", left[:, column : column + group].float(), chosen)[1].double()
        inverse = torch.linalg.inv(damped[column:, column:])
        rounded = (left[:, column] / scale[:, 0]).round().clamp(low, -low - 1) * scale[:, 0]
        error = (left[:, column] - rounded) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
        left[:, column] = rounded
    return left.float()


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.name)
def test_it_equals_the_definition_column_by_column(chosen: WeightFormat) -> None:
    """160 inputs, so that more than one block of columns is crossed."""
    weight = torch.randn(12, 160, generator=torch.Generator().manual_seed(1))
    x = correlated(160)
    found = product(*gptq_round(weight, inverse_factor(x.T @ x), chosen))
    expected = obq_reference(weight, x.T @ x, chosen)
    assert (found - expected).abs().mean() < 2e-3 * expected.abs().mean()


def test_a_group_may_cross_the_border_of_a_block() -> None:
    weight = torch.randn(12, 192, generator=torch.Generator().manual_seed(1))
    x = correlated(192)
    chosen = WeightFormat(4, 96)
    found, expected = (
        product(*gptq_round(weight, inverse_factor(x.T @ x), chosen)),
        obq_reference(weight, x.T @ x, chosen),
    )
    assert (found - expected).abs().mean() < 2e-3 * expected.abs().mean()


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.name)
def test_inputs_without_correlation_are_rounded_to_the_nearest(chosen: WeightFormat) -> None:
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    for got, nearest in zip(
        gptq_round(weight, inverse_factor(torch.eye(64) * 3), chosen), round_to_nearest("", weight, chosen), strict=True
    ):
        assert torch.equal(got, nearest)


@pytest.mark.parametrize("chosen", FORMATS[:2], ids=lambda chosen: chosen.name)
def test_outputs_err_less_than_those_of_the_nearest(chosen: WeightFormat) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(3))
    x = correlated(128)
    ours, nearest = (
        (x @ (product(*pair) - weight).T).square().mean()
        for pair in (gptq_round(weight, inverse_factor(x.T @ x), chosen), round_to_nearest("", weight, chosen))
    )
    assert ours < 0.6 * nearest


@pytest.mark.parametrize("inputs", [1, 128, 129, 387])
def test_the_factor_is_that_of_the_inverse(inputs: int) -> None:
    x = correlated(inputs)
    hessian = (x.T @ x).double()
    factor = inverse_factor(hessian)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(inputs).double()
    assert torch.equal(factor, factor.triu())
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(inputs).double(), atol=1e-9)


def test_inputs_that_are_never_read_do_no_harm() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    x = correlated(64)
    x[:, 5:9] = 0.0
    integers, scale = gptq_round(weight, inverse_factor(x.T @ x), WeightFormat(4, 32))
    assert torch.isfinite(scale.float()).all()
    small = gptq_round(weight, inverse_factor(x.T @ x * 2.0**-40), WeightFormat(4, 32))
    assert torch.equal(small[0], integers)
    assert (x @ (product(integers, scale) - weight).T).square().mean() < (x @ weight.T).square().mean() * 0.02
    none = gptq_round(weight, inverse_factor(torch.zeros(64, 64)), WeightFormat(4, 32))
    assert torch.equal(none[0], round_to_nearest("", weight, WeightFormat(4, 32))[0])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_running_from_a_layer_equals_running_all_of_them(family: str) -> None:
    model, changed = (tiny_model(num_layers=5, family=family) for _ in range(2))
    layer_stack(changed)[3].mlp.down_proj.weight.mul_(0.5)
    for batch in calibration_batches(answers()):
        prefix = read_prefix(model, batch)
        expected = changed.base_model(batch.token_ids, use_cache=False).last_hidden_state
        for first in range(4):
            assert torch.allclose(run_from(changed, prefix, first), expected, atol=1e-5)
        assert not torch.allclose(run_from(changed, prefix, 4), expected, atol=1e-2)


@torch.no_grad()
def test_a_draft_rounded_on_its_inputs_keeps_its_states() -> None:
    model = tiny_model(num_layers=2, hidden=64)
    plan = unit_formats(model, search_units(model), {"layers.*": 4, "head": 4}, 32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sample = answers(16)
    ours = quantize(Draft(model), plan, GptqRounder(model, sample)).model
    nearest = quantize(Draft(model), plan).model
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    batch = calibration_batches(sample)[0]
    plain, *rounded = (one(batch.token_ids).logits[batch.read] for one in (model, ours, nearest))
    errors = [float((logits - plain).square().mean()) for logits in rounded]
    assert errors[0] < 0.9 * errors[1]


def test_matrices_are_rounded_on_inputs_that_earlier_rounding_changed() -> None:
    model = tiny_model()
    chosen = WeightFormat(4, 32)
    name = "model.layers.3.self_attn.q_proj"
    weight = model.get_submodule(name).weight.detach()
    alone = GptqRounder(model, answers())
    after = GptqRounder(model, answers())
    for layer in range(3):
        down = f"model.layers.{layer}.mlp.down_proj"
        after(down, model.get_submodule(down).weight.detach(), chosen)
    assert not torch.equal(alone(name, weight, chosen)[0], after(name, weight, chosen)[0])


def test_it_needs_answers() -> None:
    with pytest.raises(UserError, match="collect a trace"):
        GptqRounder(tiny_model(), [])
