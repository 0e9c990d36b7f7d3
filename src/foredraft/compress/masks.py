"""Masks of single weights, for analysis only: zeros that no runtime named here skips make no step faster.

Source: Sun et al. 2023, Wanda (arXiv 2306.11695): a weight counts with the norm of the input that it is multiplied by,
and weights are compared within an output.
"""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from foredraft.compress.choice import simulated
from foredraft.core.errors import RecipeError
from foredraft.models.calibration import Batch, watch
from foredraft.models.draft import Draft
from foredraft.models.units import search_units


def read_mask(text: str) -> tuple[int, int] | float:
    """Return (2, 4) for 2:4, which keeps 2 of each 4 weights, or the share that is cut for a number such as 0.5.

    Raises:
        RecipeError: it is neither.
    """
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        kept, of = int(match[1]), int(match[2])
        if 0 < kept < of:
            return kept, of
    elif re.fullmatch(r"0?\.\d+", text):
        return float(text)
    raise RecipeError(f"masks: {text!r} is no mask: write 2:4 for two of each four weights kept, or 0.5 for half cut.")


def kept_weights(importance: Float[Tensor, "out in"], mask: tuple[int, int] | float) -> Bool[Tensor, "out in"]:
    """Return which weights of each output stay, the most important ones."""
    rows, inputs = importance.shape
    if isinstance(mask, float):
        return _most(importance, inputs - round(mask * inputs))
    kept, of = mask
    if inputs % of:
        raise RecipeError(f"masks: {of} does not divide the {inputs} inputs of a matrix.")
    return _most(importance.reshape(-1, of), kept).view(rows, inputs)


def masked(draft: Draft, mask: tuple[int, int] | float, batches: Sequence[Batch]) -> Draft:
    """Return the draft with every matrix of its body masked; what is not masked is shared with it."""
    modules = [module for unit in search_units(draft.model) if unit.layer >= 0 for module in unit.modules]
    norms = _input_norms(draft.model, modules, batches)
    cut = simulated(draft, {})
    for name in modules:
        weight = draft.model.get_submodule(name).weight.detach()
        kept = kept_weights(weight.abs() * norms[name], mask)
        cut.model.get_submodule(name).weight = nn.Parameter(weight * kept, requires_grad=False)
    return cut


def _most(importance: Float[Tensor, "rows in"], count: int) -> Bool[Tensor, "rows in"]:
    kept = torch.zeros_like(importance, dtype=torch.bool)
    return kept.scatter_(1, importance.topk(count, dim=1).indices, True)


def _input_norms(model: nn.Module, modules: Sequence[str], batches: Sequence[Batch]) -> dict[str, Float[Tensor, " in"]]:
    squares = {name: torch.zeros(model.get_submodule(name).in_features, dtype=torch.float64) for name in modules}
    for batch in batches:
        watchers = {
            model.get_submodule(name): lambda features, _, name=name: squares[name].add_(features.square().sum(0).cpu())
            for name in modules
        }
        watch(model, batch, watchers)
    return {name: value.sqrt().float() for name, value in squares.items()}
