"""Texts as they stand before each layer, so that after a change only the layers behind it are run again."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.models.calibration import Batch
from foredraft.models.layers import layer_owner, layer_stack

# Beside the layers of Llama and most others, OPT and GPT-NeoX, Phi, GPT-2.
_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A batch of texts inside a model.

    Attributes:
        states: What each layer reads, and last what the final norm reads.
        settings: What each layer is told beside its states: positions, masks.
    """

    batch: Batch
    states: list[Float[Tensor, "texts tokens hidden"]]
    settings: list[dict[str, Any]]


class Reached(Exception):
    """A pass has read as far as it is needed."""


@torch.no_grad()
def read_prefix(model: PreTrainedModel, batch: Batch, last: bool = True) -> Prefix:
    """Run a model over a batch and keep what stands before each layer.

    Args:
        last: False keeps the states before the first layer only, and runs no more where all layers are told the same.
    """
    stack = layer_stack(model)
    alike = len(set(getattr(model.config.get_text_config(), "layer_types", None) or ())) <= 1
    states: list[Tensor] = []
    settings: list[dict[str, Any]] = []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        given = dict(given)
        state = inputs[0] if inputs else given.pop("hidden_states")
        settings.append(given)
        if last or not states:
            states.append(state)
        if alike and not last:
            settings.extend([given] * (len(stack) - 1))
            raise Reached

    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in stack]
    handles.append(final_norm(model).register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])))
    try:
        with suppress(Reached):
            model.base_model(batch.token_ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Prefix(batch, states, settings)


@torch.no_grad()
def run_layer(
    layer: nn.Module, state: Float[Tensor, "texts tokens hidden"], settings: dict[str, Any]
) -> Float[Tensor, "texts tokens hidden"]:
    """Return what a layer makes of states."""
    output = layer(state, **settings)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def run_from(
    model: PreTrainedModel, prefix: Prefix, first: int, without: int = -1
) -> Float[Tensor, "texts tokens hidden"]:
    """Return the final hidden states of a model that differs from the one that was read from layer `first` on only.

    Args:
        without: A layer that is left out.
    """
    state = prefix.states[first]
    for number, layer in enumerate(layer_stack(model)):
        if number >= first and number != without:
            state = run_layer(layer, state, prefix.settings[number])
    return final_norm(model)(state)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm behind the last layer, whose outputs the head reads.

    Raises:
        ModelError: there is none under a name that is known, or something stands between it and the head.
    """
    beside = dict(layer_owner(model).named_children())
    norms = [beside[name] for name in _FINAL_NORMS if name in beside]
    if not norms or "project_out" in beside:
        raise ModelError(
            f"{type(model).__name__} does not end in a norm behind its layers, one of {', '.join(_FINAL_NORMS)}: it "
            "cannot be probed."
        )
    return norms[0]
