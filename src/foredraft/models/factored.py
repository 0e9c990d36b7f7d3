"""Linear layers whose matrix is kept, and multiplied by, as two thin ones; only this package reads folders of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.checkpoint import FACTORS
from foredraft.models.assembled import assembled
from foredraft.models.linear import linear_of


@final
class FactoredLinear(nn.Module):
    """x -> x Wᵀ + bias with W = outer.weight @ inner.weight, which is never made; the bias is that of `outer`."""

    def __init__(self, inner: nn.Linear, outer: nn.Linear) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return self.outer(self.inner(x))

    def product(self) -> Float[Tensor, "out in"]:
        """Return W; each entry is rounded once."""
        outer, inner = self.outer.weight.detach(), self.inner.weight.detach()
        return (outer.double() @ inner.double()).to(outer.dtype)


def has_factors(model: nn.Module) -> bool:
    """Return whether some matrix of a model is kept as two."""
    return any(isinstance(module, FactoredLinear) for module in model.modules())


def multiply_out(model: PreTrainedModel) -> int:
    """Make every factored matrix of a model one plain linear layer, in place; return how many there were."""
    factored = {name: module for name, module in model.named_modules() if isinstance(module, FactoredLinear)}
    for name, module in factored.items():
        model.set_submodule(name, linear_of(module.product(), module.outer.bias))
    return len(factored)


def load_factored(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of a folder that holds FACTORS.

    Raises:
        ModelError: its weights are not those that its config.json asks for.
    """

    def swap(name: str, linear: nn.Linear, weights: Mapping[str, Tensor]) -> nn.Module:
        inner = weights.get(f"{name}.inner.weight")
        if inner is None:
            return linear
        outer = torch.empty(linear.out_features, len(inner), dtype=dtype, device="meta")
        return FactoredLinear(linear_of(inner.to("meta", dtype)), linear_of(outer, linear.bias))

    return assembled(path / FACTORS, dtype, swap)
