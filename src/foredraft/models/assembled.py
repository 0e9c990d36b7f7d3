"""Models put together from files that hold other layers than their configuration asks for."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foredraft.core.errors import ModelError

# Told the name of a linear layer, the layer and the weights of the file; returns, on the meta device, what takes its
# place, or itself.
Swap = Callable[[str, nn.Linear, Mapping[str, Tensor]], nn.Module]


def assembled(file: Path, dtype: torch.dtype, swap: Swap) -> PreTrainedModel:
    """Return the model of a folder, in evaluation mode.

    Args:
        file: Its weights, in that folder.
        dtype: Of what is no integer and no scale of integers.

    Raises:
        ModelError: the weights are not those that the layers ask for.
    """
    state = load_file(file)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent), dtype=dtype)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, swap(name, linear, state))
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() and not name.endswith(".weight_scale") else tensor
        for name, tensor in state.items()
    }
    _, unknown = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent or unknown:
        fault = f"lacks {absent[0]}" if absent else f"holds {unknown[0]}, which config.json does not ask for"
        raise ModelError(f"{file} {fault}. Make the draft again.")
    if (file.parent / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(file.parent)
    return model.eval()
