"""Low rank: the matrices of a draft as products of two thin ones, chosen for what they make of the draft's own inputs.

Source: Wang et al. 2024, SVD-LLM (arXiv 2403.07378), whose whitening by the Cholesky factor of the inputs' covariance
makes the truncation optimal for the outputs; here the covariance is damped.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.core.errors import RecipeError
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.models.calibration import Batch, watch
from foredraft.models.draft import Draft
from foredraft.models.factored import FactoredLinear
from foredraft.models.linear import linear_of
from foredraft.models.units import search_units

_DAMPING = 1e-4


@dataclass(frozen=True, slots=True)
class Cut:
    """What a matrix lost.

    Attributes:
        rank: That it has now.
        dense: Weights of the matrix itself.
        parameters: Of its two factors.
        error: Squared error of its outputs on the inputs that were read / their square.
    """

    module: str
    rank: int
    dense: int
    parameters: int
    error: float


def low_rank_factors(
    weight: Float[Tensor, "out in"], covariance: Float[Tensor, "in in"], rank: int
) -> tuple[Float[Tensor, "out rank"], Float[Tensor, "rank in"]]:
    """Return factors whose product is, of that rank, nearest to the weight in its outputs on the inputs.

    Each column of the one is as long as its row of the other, so that one learning rate suits both.

    Args:
        covariance: Sum over positions of the outer product of the inputs, of any scale; the identity gives the plain
            singular value decomposition.
        rank: >= 1; at most the smaller side.
    """
    size = _DAMPING * covariance.diagonal().mean().clamp(min=1e-12)
    root = torch.linalg.cholesky(covariance.double() + size.double() * torch.eye(len(covariance), dtype=torch.float64))
    left, values, right = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    outer, inner = left[:, :rank], torch.linalg.solve_triangular(root, right[:rank], upper=False, left=False)
    length = (values[:rank] / inner.norm(dim=1)).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return (outer * values[:rank] / length).to(weight.dtype), (length[:, None] * inner).to(weight.dtype)


def cut_ranks(
    draft: Draft, ranks: dict[str, int], batches: Sequence[Batch], progress: Progress = SILENT
) -> tuple[Draft, list[Cut]]:
    """Return the draft with some matrices of lower rank, as their factors; see models.factored.multiply_out.

    Args:
        draft: Left as it was; embeddings and head are shared.
        ranks: By unit; see models.units.
        batches: What the inputs are taken from, as the cut matrices before leave them; none: the weights alone decide,
            by the plain singular value decomposition.

    Raises:
        RecipeError: a unit that the draft lacks, or a rank that is none.
    """
    units = {unit.name: unit for unit in search_units(draft.model)}
    for name, rank in ranks.items():
        if name not in units or units[name].layer < 0:
            raise RecipeError(f"There is no unit {name!r} in a layer. Units are such as layers.0.qkv.")
        least = min(min(draft.model.get_submodule(module).weight.shape) for module in units[name].modules)
        if not 1 <= rank <= least:
            raise RecipeError(f"rank {rank} of {name} is none: it has ranks from 1 to {least}.")
    shared = [draft.model.get_input_embeddings().weight, draft.model.get_output_embeddings().weight]
    model = copy.deepcopy(draft.model, {id(weight): weight for weight in shared})
    cuts = []
    for name, rank in tracked(progress, "cutting ranks", list(ranks.items()), "units"):
        covariance = _covariance(model, units[name].modules[0], batches)
        cuts += [_cut(model, module, rank, covariance) for module in units[name].modules]
    return Draft(model, draft.head_token_ids), cuts


def _covariance(model: nn.Module, module: str, batches: Sequence[Batch]) -> Float[Tensor, "in in"]:
    """Return the sum of outer products of what a module reads; all modules of a unit read the same."""
    linear = model.get_submodule(module)
    if not batches:
        return torch.eye(linear.in_features, dtype=torch.float64)
    covariance = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64)

    def add(features: Tensor, _: Tensor) -> None:
        covariance.add_((features.T @ features).cpu())

    for batch in batches:
        watch(model, batch, {linear: add})
    return covariance


def _cut(model: nn.Module, module: str, rank: int, covariance: Float[Tensor, "in in"]) -> Cut:
    linear = model.get_submodule(module)
    weight = linear.weight.detach()
    outer, inner = low_rank_factors(weight, covariance, rank)
    factored = FactoredLinear(linear_of(inner), linear_of(outer, linear.bias))
    model.set_submodule(module, factored)
    error = _error(weight, factored.product(), covariance)
    return Cut(module, rank, weight.numel(), outer.numel() + inner.numel(), error)


def _error(before: Tensor, after: Tensor, covariance: Tensor) -> float:
    lost, whole = (after - before).double(), before.double()
    return float((lost @ covariance * lost).sum() / (whole @ covariance * whole).sum())
