"""Low-rank updates in place of a draft's matrices, for drafts too big to train whole (through peft)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from peft import LoraConfig, LoraModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import RecipeError
from foredraft.steps import LoraSettings

_NAME = "default"


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> LoraModel:
    """Put low-rank updates that change nothing yet into `model`, in place, and freeze all else in it.

    W + alpha/rank * B A, with B zero and A drawn from `seed`.

    Source: Hu et al. 2021 (arXiv 2106.09685).

    Raises:
        RecipeError: no module of the body has one of the names asked for.
    """
    modules = _modules(model, settings.modules)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha or 2 * settings.rank, target_modules=modules, init_lora_weights=False
    )
    # What peft draws from the global generator is drawn again below.
    with torch.random.fork_rng(devices=[]):
        adapted = LoraModel(model, config, _NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if ".lora_A." in name:
            drawn = torch.empty(weight.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            weight.data.copy_(drawn)
        elif ".lora_B." in name:
            nn.init.zeros_(weight)
    return adapted


def merge_lora(adapted: LoraModel, weights: Mapping[str, Float[Tensor, "..."]]) -> PreTrainedModel:
    """Return the plain model that `add_lora` changed, with trained updates added to its matrices for good."""
    parameters = dict(adapted.model.named_parameters())
    for name, weight in weights.items():
        parameters[name].data.copy_(weight)
    merged: Any = adapted.merge_and_unload()
    return merged


def _modules(model: PreTrainedModel, wanted: list[str]) -> list[str]:
    head = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    unknown = [name for name in wanted if name not in found]
    if unknown or not found:
        raise RecipeError(
            f"lora.modules: {', '.join(unknown) or 'nothing'} is no matrix of {type(model).__name__}, which has "
            f"{', '.join(sorted(found)) or 'none'}."
        )
    return wanted or sorted(found)
