"""The decoder layers of a model: where they are, and a copy of the model with some of them."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, RecipeError

# The norms of a layer as Llama and Qwen build it: before attention, and before the feed-forward part.
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")

_LISTS_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's decoder layers, the very one that it runs.

    Raises:
        ModelError: the architecture does not keep its layers in one list.
    """
    return model.get_submodule(_stack_name(model))


def layer_owner(model: PreTrainedModel) -> nn.Module:
    """Return the module that holds the list of layers, and beside it what stands before and behind them.

    Raises:
        ModelError: the architecture does not keep its layers in one list.
    """
    return model.get_submodule(_stack_name(model).rpartition(".")[0])


def has_pre_norms_only(layer: nn.Module) -> bool:
    """Return whether what a layer computes is added as it is: no norm stands behind it."""
    return {name for name, _ in layer.named_children() if name.endswith("norm")} == set(PRE_NORMS)


def keep_layers(
    model: PreTrainedModel, layers: Sequence[int], shared: Sequence[torch.nn.Parameter] = ()
) -> PreTrainedModel:
    """Return a copy of `model` that runs only the given layers, with a plain configuration that says so.

    Args:
        model: Left as it was.
        layers: Numbers from 0, in the order in which the copy runs them.
        shared: Weights that the copy takes over without copying them.

    Raises:
        RecipeError: no layer, or one that the model lacks.
    """
    stack, name = layer_stack(model), _stack_name(model)
    outside = [layer for layer in layers if not 0 <= layer < len(stack)]
    if outside or not layers:
        raise RecipeError(
            f"layers {list(outside or layers)} cannot be kept: the model has layers 0 to {len(stack) - 1}."
        )
    memo: dict[int, object] = {id(stack[layer]): None for layer in range(len(stack)) if layer not in layers}
    memo |= {id(weight): weight for weight in shared}
    smaller = copy.deepcopy(model, memo)
    copied = smaller.get_submodule(name)
    kept = nn.ModuleList(copied[layer] for layer in layers)
    setattr(layer_owner(smaller), name.rpartition(".")[2], kept)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = index
    _describe(smaller, layers)
    return smaller


def _stack_name(model: PreTrainedModel) -> str:
    count = model.config.get_text_config().num_hidden_layers
    stacks = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"{type(model).__name__} does not keep its {count} layers in one list; only such models can be cut."
        )
    return stacks[0]


def _describe(model: PreTrainedModel, layers: Sequence[int]) -> None:
    config = model.config.get_text_config()
    config.num_hidden_layers = len(layers)
    for key in _LISTS_BY_LAYER:
        if isinstance(values := getattr(config, key, None), list):
            setattr(config, key, [values[layer] for layer in layers])
