"""Low-rank factors shared with the frozen target: each matrix of the draft is U V, U the target's, only V learns.

Saved, a draft is one dense matrix U V again, under a plain configuration, since no runtime reads factors: its bytes
and its time are those of the dense draft. The rank bounds what training can change and what a draft needs beside its
target, not what the saved draft costs.
"""

import copy
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.models.layers import layer_stack
from foredraft.models.linear import linear_of


@final
class SharedLinear(nn.Module):
    """A linear layer whose matrix is `basis @ weight`.

    Attributes:
        basis: U, orthonormal columns that the target's matrix is most of; never trained.
        weight: V, what learns.
    """

    def __init__(
        self, basis: Float[Tensor, "out rank"], weight: Float[Tensor, "rank in"], bias: Float[Tensor, " out"] | None
    ) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return functional.linear(functional.linear(input, self.weight), self.basis, self.bias)


def share_factors(draft: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int], rank: int) -> PreTrainedModel:
    """Return a copy of a draft whose matrices are U V, with U from the target's; both are left as they were.

    U holds the leading left singular vectors of the target's own matrix, and V is Uᵀ W for the draft's W. Where W
    is the target's, U V is the nearest matrix of that rank; where W was such a product before, nothing changes
    but for rounding. A rank above a matrix's own is that one's.

    Args:
        draft: Layers `layers` of the target, at its width, trained or not.
        rank: Columns of U, >= 1.

    Raises:
        ModelError: the draft's layers have other shapes than the target's.
    """
    shared = [draft.get_input_embeddings().weight, draft.get_output_embeddings().weight]
    factored = copy.deepcopy(draft, {id(weight): weight for weight in shared})
    for layer, number in zip(layer_stack(factored), layers, strict=True):
        theirs = layer_stack(target)[number]
        for name, linear in [*layer.named_modules()]:
            if isinstance(linear, nn.Linear):
                parent, _, attribute = name.rpartition(".")
                factors = _factored(linear, theirs.get_submodule(name), rank)
                setattr(layer.get_submodule(parent), attribute, factors)
    return factored


def _factored(linear: nn.Linear, theirs: nn.Module, rank: int) -> SharedLinear:
    if theirs.weight.shape != linear.weight.shape:
        raise ModelError(
            f"Factors are shared between matrices of one shape: the draft's is {tuple(linear.weight.shape)}, the "
            f"target's {tuple(theirs.weight.shape)}. Share factors in a draft of the target's own width."
        )
    left = torch.linalg.svd(theirs.weight.detach().float(), full_matrices=False).U[:, :rank].to(linear.weight)
    return SharedLinear(left.contiguous(), left.T @ linear.weight.detach(), linear.bias)


def fold_factors(model: PreTrainedModel) -> PreTrainedModel:
    """Make every shared matrix of a model one dense linear layer again, in place; return the model."""
    for name, shared in [*model.named_modules()]:
        if isinstance(shared, SharedLinear):
            model.set_submodule(name, linear_of(shared.basis @ shared.weight, shared.bias))
    return model


def bytes_beside_target(model: PreTrainedModel) -> int:
    """Return the bytes that a draft of shared factors needs beside a target that holds the factors U.

    Counted are V, biases and norms. Embeddings, head and U are the target's.
    """
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    own = [weight for weight in model.parameters() if id(weight) not in ends]
    return sum(weight.numel() * weight.element_size() for weight in own)
