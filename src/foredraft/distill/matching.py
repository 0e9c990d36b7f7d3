"""Layer matching: draw the draft's hidden states towards the target's, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.packed import run_body
from foredraft.distill.packing import Pack


@dataclass(frozen=True, slots=True)
class LayerMatching:
    """A target, and which of its states each layer of a draft is drawn to.

    Attributes:
        target: Run live on the same text, without a gradient.
        layers: For each layer of the draft the number of target layers behind which the state is taken.
    """

    target: PreTrainedModel
    layers: tuple[int, ...]

    @staticmethod
    def even(target: PreTrainedModel, draft: PreTrainedModel) -> "LayerMatching":
        """Return the matching that puts layer i of n behind i/n of the target's depth, rounded up.

        Raises:
            ModelError: the two have hidden states of different width.
        """
        deep, shallow = target.config.get_text_config(), draft.config.get_text_config()
        if deep.hidden_size != shallow.hidden_size:
            raise ModelError(
                f"layer_matching compares hidden states: the target's have width {deep.hidden_size}, the draft's "
                f"{shallow.hidden_size}. Set layer_matching to 0."
            )
        num_layers = shallow.num_hidden_layers
        return LayerMatching(
            target, tuple(-(-layer * deep.num_hidden_layers // num_layers) for layer in range(1, num_layers + 1))
        )

    def losses(self, states: Sequence[Float[Tensor, "1 tokens hidden"]], pack: Pack) -> Float[Tensor, " positions"]:
        """Return the mean squared difference of normalised states where the pack is read, averaged over layers.

        In [0, 4], 0 only for states of equal direction.

        Args:
            states: The draft's: embeddings, then behind each layer, the last one behind the final norm.
            pack: What the draft read.
        """
        with torch.no_grad():
            there = run_body(self.target, pack, output_hidden_states=True).hidden_states
        differences = [
            (_normalised(here[0, pack.read]) - _normalised(there[layer][0, pack.read].float())).square().mean(-1)
            for here, layer in zip(states[1:], self.layers, strict=True)
        ]
        return torch.stack(differences).mean(0)


def _normalised(state: Float[Tensor, "positions hidden"]) -> Float[Tensor, "positions hidden"]:
    return state * state.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
