"""Rounding that makes up for itself: each column's error is spread over the columns that are rounded after it.

Source: Frantar et al. 2023, GPTQ (arXiv 2210.17323), Algorithm 1, which is OBQ with a fixed order of columns. Columns
come as they stand; the inputs are those of the draft whose earlier matrices are rounded already.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.compress.prefix import Reached, final_norm, read_prefix, run_layer
from foredraft.compress.quantize import Rounded
from foredraft.compress.rounding import group_scales, product, round_rows, to_integers
from foredraft.core.protocols import Answer
from foredraft.models.calibration import calibration_batches
from foredraft.models.compressed import WeightFormat
from foredraft.models.layers import layer_stack
from foredraft.models.units import part_of

_BLOCK = 128
_DAMPING = 0.01


def gptq_round(weight: Float[Tensor, "out in"], factor: Float[Tensor, "in in"], weight_format: WeightFormat) -> Rounded:
    """Return integers and scales that keep weight @ inputs near what it was, in least squares over the inputs.

    Args:
        weight: Left as it was.
        factor: See inverse_factor.
        weight_format: Groups get the scale of what their columns are when the first of them is rounded.
    """
    upper = factor.to(weight.device, torch.float32)
    left = weight.float().T.contiguous()  # a column of the weight is a row here, which lies in one piece
    inputs, group = len(left), weight_format.group or len(left)
    integers = torch.empty_like(left)
    scales = [round_rows(weight)[1].float()[:, 0]] if not weight_format.group else []
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        errors = left.new_zeros(end - start, left.shape[1])
        for column in range(start, end):
            if weight_format.group and column % group == 0:
                # Columns of the group beyond this block have not had their share of its errors yet.
                ahead = left[column : column + group].clone()
                if column + group > end:
                    ahead[end - column :] -= upper[start:end, end : column + group].T @ errors
                scales.append(group_scales(ahead.T, weight_format.bits, group).float()[:, 0])
            integers[column] = to_integers(left[column], scales[-1], weight_format.bits)
            error = (left[column] - integers[column] * scales[-1]) / upper[column, column]
            left[column:end].addr_(upper[column, column:end], error, alpha=-1.0)
            errors[column - start] = error
        left[end:] -= upper[start:end, end:].T @ errors
    return integers.T.to(torch.int8).contiguous(), torch.stack(scales, dim=1).bfloat16()


def inverse_factor(hessian: Float[Tensor, "in in"]) -> Float[Tensor, "in in"]:
    """Return the upper Cholesky factor of the inverse of the damped Hessian, in float64.

    Args:
        hessian: Sum over positions of the outer product of the inputs, of any scale. Inputs that are never read count
            alone.
    """
    hessian = hessian.double()
    size = hessian.diagonal().mean()
    size = size if size > 0 else torch.ones_like(size)
    damped = hessian + size * torch.diag((hessian.diagonal() == 0).double() + _DAMPING)
    # With columns in reverse order the lower factor of the Hessian is the upper one of R Rᵀ, and the wanted factor is
    # the inverse of R: half of the work of inverting the Hessian and taking the factor of that.
    reverse = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return _inverse_of_upper(reverse)


@final
class GptqRounder:
    """Rounds the matrices of a model in the order in which they are run, each on what reaches it.

    One layer is copied at a time. Texts are kept as they stand before it.
    """

    def __init__(self, model: PreTrainedModel, answers: Sequence[Answer]) -> None:
        """Read the answers; the model is left as it was."""
        self._model = model
        self._names = dict(model.named_modules())
        self._prefixes = [read_prefix(model, batch, last=False) for batch in calibration_batches(answers)]
        self._states = [prefix.states[0] for prefix in self._prefixes]
        self._at = 0
        self._layer = copy.deepcopy(layer_stack(model)[0])
        self._factors: dict[str, Tensor] = {}

    def __call__(self, name: str, weight: Float[Tensor, "out in"], weight_format: WeightFormat) -> Rounded:
        """Return the integers of one matrix; those of earlier layers cannot be asked for afterwards."""
        stack = layer_stack(self._model)
        number = next(
            (at for at, layer in enumerate(stack) if any(part is self._names[name] for part in layer.modules())), None
        )
        if number is None:
            self._go_to(len(stack))
            factor = inverse_factor(self._head_hessian())
        else:
            self._go_to(number)
            if part_of(name) not in self._factors:
                self._factors[part_of(name)] = inverse_factor(self._hessian(name))
            factor = self._factors[part_of(name)]
        integers, scale = gptq_round(weight, factor, weight_format)
        if number is not None:
            with torch.no_grad():
                self._working(name).weight.copy_(product(integers, scale))
        return integers, scale

    def _go_to(self, number: int) -> None:
        stack = layer_stack(self._model)
        while self._at < number:
            settings = [prefix.settings[self._at] for prefix in self._prefixes]
            self._states = [
                run_layer(self._layer, state, given) for state, given in zip(self._states, settings, strict=True)
            ]
            self._at += 1
            self._factors = {}
            if self._at < len(stack):
                self._layer = copy.deepcopy(stack[self._at])

    def _working(self, name: str) -> nn.Module:
        original = next(
            part for part, module in layer_stack(self._model)[self._at].named_modules() if module is self._names[name]
        )
        return self._layer.get_submodule(original)

    def _hessian(self, name: str) -> Float[Tensor, "in in"]:
        """Return the sum of outer products of what a matrix of the layer at hand reads."""
        module = self._working(name)
        hessian = torch.zeros(module.in_features, module.in_features)
        for prefix, state in zip(self._prefixes, self._states, strict=True):
            _add_outer(hessian, _input_of(module, self._layer, state, prefix.settings[self._at]), prefix.batch.read)
        return hessian

    def _head_hessian(self) -> Float[Tensor, "in in"]:
        norm = final_norm(self._model)
        hessian = torch.zeros(self._states[0].shape[-1], self._states[0].shape[-1])
        for prefix, state in zip(self._prefixes, self._states, strict=True):
            with torch.no_grad():
                _add_outer(hessian, norm(state), prefix.batch.read)
        return hessian


@torch.no_grad()
def _input_of(module: nn.Module, layer: nn.Module, state: Tensor, settings: dict[str, Any]) -> Tensor:
    found: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0])
        raise Reached

    handle = module.register_forward_pre_hook(stop)
    try:
        with suppress(Reached):
            run_layer(layer, state, settings)
    finally:
        handle.remove()
    return found[0]


def _inverse_of_upper(upper: Float[Tensor, "in in"]) -> Float[Tensor, "in in"]:
    """Return the inverse of an upper triangular matrix, by halves: a third of the work of solving for the identity."""
    size = len(upper)
    if size <= _BLOCK:
        return torch.linalg.solve_triangular(upper, torch.eye(size).to(upper), upper=True)
    half = size // 2
    first, corner, last = upper[:half, :half], upper[:half, half:], upper[half:, half:]
    inverse = torch.zeros_like(upper)
    inverse[:half, :half], inverse[half:, half:] = _inverse_of_upper(first), _inverse_of_upper(last)
    solved = torch.linalg.solve_triangular(first, corner, upper=True)
    inverse[:half, half:] = -torch.linalg.solve_triangular(last, solved, upper=True, left=False)
    return inverse


def _add_outer(hessian: Tensor, features: Float[Tensor, "*positions in"], read: Tensor) -> None:
    rows = features.reshape(*read.shape, -1)[read.to(features.device)].float()  # OPT flattens texts and tokens
    hessian += (rows.T @ rows).cpu()
