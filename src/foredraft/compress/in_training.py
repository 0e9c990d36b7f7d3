"""Drafts that are trained with their rounding in place: they run on rounded weights, gradients go to the plain ones.

Source: Bengio et al. 2013 (arXiv 1308.3432), the straight-through estimator. Scales stay those of the first rounding,
so that a draft that learns nothing is that rounded draft.
"""

import copy
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor, nn
from torch.nn import functional

from foredraft.compress.quantize import Rounded, Rounder
from foredraft.compress.rounding import product, to_integers
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.linear import linear_of
from foredraft.models.units import HEAD, search_units


@final
class RoundingLinear(nn.Module):
    """x -> x W^T + bias with W = `weight` rounded to integers * scale of its group.

    Attributes:
        weight: Plain; what learns.
        scale: Of each output and group of inputs.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        scale: BFloat16[Tensor, "out groups"],
        bias: nn.Parameter | None,
        bits: int,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale: Tensor
        self.register_buffer("scale", scale)
        self.bias = bias
        self.bits = bits
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return functional.linear(x, _StraightThrough.apply(self.weight, self.scale, self.bits), self.bias)


def with_rounding(
    draft: Draft, formats: Mapping[str, WeightFormat], rounder: Rounder
) -> tuple[Draft, dict[str, Tensor]]:
    """Return the draft as it is trained, and the scales of its rounded matrices by module; see without_rounding.

    Matrices of the body learn, from their plain weights, or from the grid where the rounder does not round to nearest.
    A head is rounded for good.

    Args:
        draft: Not quantized; float32. Left as it was.
        formats: By unit.
    """
    shared = [draft.model.get_input_embeddings().weight, draft.model.get_output_embeddings().weight]
    model = copy.deepcopy(draft.model, {id(weight): weight for weight in shared})
    scales = {}
    for unit in search_units(draft.model):
        for module in unit.modules if unit.name in formats else ():
            linear, bits = model.get_submodule(module), formats[unit.name].bits
            plain = linear.weight.detach()
            integers, scales[module] = rounder(module, plain, formats[unit.name])
            on_grid = product(integers, scales[module])
            if unit.name == HEAD:
                linear.weight = nn.Parameter(on_grid, requires_grad=False)
                model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
            else:
                start = torch.where(_integers(plain, scales[module], bits) == integers, plain, on_grid)
                model.set_submodule(module, RoundingLinear(start, scales[module], linear.bias, bits))
    return Draft(model, draft.head_token_ids), scales


def without_rounding(draft: Draft, scales: Mapping[str, Tensor]) -> tuple[Draft, Rounder]:
    """Return a trained draft with plain linear layers, and what rounds them to the integers it was trained with."""
    model = copy.deepcopy(draft.model)
    for name, rounding in [*model.named_modules()]:
        if isinstance(rounding, RoundingLinear):
            model.set_submodule(name, linear_of(rounding.weight, rounding.bias))

    def round_as_trained(module: str, weight: Float[Tensor, "out in"], weight_format: WeightFormat) -> Rounded:
        return _integers(weight, scales[module], weight_format.bits).to(torch.int8), scales[module]

    return Draft(model, draft.head_token_ids), round_as_trained


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, bits: int) -> Tensor:
        return _integers(weight, scale, bits) * _wide(weight, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def _integers(weight: Tensor, scale: Tensor, bits: int) -> Float[Tensor, "out in"]:
    return to_integers(weight.float(), _wide(weight, scale), bits)


def _wide(weight: Tensor, scale: Tensor) -> Float[Tensor, "out in"]:
    return scale.float().repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
