"""Layer matching: hidden states of a draft against those of the target, layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.distill.packing import Pack
from foredraft.distill.seeing import Asked, Seen

Distance = Callable[[Float[Tensor, "positions hidden"], Float[Tensor, "positions hidden"]], Float[Tensor, " positions"]]


def mse(
    here: Float[Tensor, "positions hidden"], there: Float[Tensor, "positions hidden"]
) -> Float[Tensor, " positions"]:
    """Return the mean squared difference over the target's mean square.

    In [0, inf), 0 only for equal states, 1 for a draft of zeros. Relative, because states grow by orders of magnitude
    from layer to layer and at single tokens.

    Source: Jiao et al. 2020 (TinyBERT, arXiv 1909.10351), equation 8; the division is ours.
    """
    return (here - there).square().mean(-1) / there.square().mean(-1).clamp(min=1e-6)


def normalised_mse(
    here: Float[Tensor, "positions hidden"], there: Float[Tensor, "positions hidden"]
) -> Float[Tensor, " positions"]:
    """Return the mean squared difference of states brought to a mean square of 1.

    In [0, 4], 0 only for states of equal direction; twice the cosine distance.
    """
    return (_normalised(here) - _normalised(there)).square().mean(-1)


def cosine(
    here: Float[Tensor, "positions hidden"], there: Float[Tensor, "positions hidden"]
) -> Float[Tensor, " positions"]:
    """Return 1 - cos of the angle between the states, in [0, 2], 0 only for equal directions.

    Source: Sanh et al. 2019 (DistilBERT, arXiv 1910.01108), section 3.
    """
    return 1.0 - torch.cosine_similarity(here, there, -1)


@dataclass(frozen=True, slots=True)
class LayerMatching:
    """Pairs of layers whose states are compared.

    Attributes:
        pairs: Draft layer and target layer, from 0.
        distance: mse, normalised_mse or cosine.
        projections: From the draft's width to the target's, by name; empty where the widths are equal.
    """

    pairs: tuple[tuple[int, int], ...]
    distance: str
    projections: Mapping[str, nn.Parameter]

    @property
    def asks_draft(self) -> Asked:
        return Asked(states=True)

    @property
    def asks_target(self) -> Asked:
        return Asked(states=True)

    def losses(self, here: Seen, there: Seen, pack: Pack) -> Float[Tensor, " positions"]:
        """Return the distance where the pack is read, averaged over pairs; last states are behind the final norm."""
        distance = _DISTANCES[self.distance]
        return torch.stack(
            [
                distance(
                    self._projected(here.states[layer + 1][0, pack.read].float(), layer),
                    there.states[other + 1][0, pack.read].float(),
                )
                for layer, other in self.pairs
            ]
        ).mean(0)

    def _projected(self, state: Float[Tensor, "positions _"], layer: int) -> Float[Tensor, "positions _"]:
        matrix = self.projections.get(_name(layer))
        return state if matrix is None else state @ matrix.T


def projections(
    target: PreTrainedModel, draft: PreTrainedModel, pairs: Sequence[tuple[int, int]], seed: int
) -> dict[str, nn.Parameter]:
    """Return a random matrix for each pair, float32, that keeps a state's size; none where the widths are equal."""
    wide, narrow = (model.config.get_text_config().hidden_size for model in (target, draft))
    if wide == narrow:
        return {}
    generator = torch.Generator().manual_seed(seed)
    return {
        _name(layer): nn.Parameter(
            (torch.randn(wide, narrow, generator=generator) / narrow**0.5).to(draft.device), requires_grad=True
        )
        for layer, _ in pairs
    }


def _name(layer: int) -> str:
    return f"matching.projection.{layer}"


def _normalised(state: Float[Tensor, "positions hidden"]) -> Float[Tensor, "positions hidden"]:
    return state * state.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


_DISTANCES: dict[str, Distance] = {"mse": mse, "normalised_mse": normalised_mse, "cosine": cosine}
