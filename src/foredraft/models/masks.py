"""Attention masks that a model is given ready-made, where its own causal mask does not fit: trees, ragged batches."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import CapabilityError

_FULL, _SLIDING = "full_attention", "sliding_attention"

Mask = Float[Tensor, "rows 1 queries columns"]


def attention_masks(
    model: PreTrainedModel,
    visible: Bool[Tensor, "rows queries columns"],
    query_positions: Int[Tensor, "rows queries"],
    column_positions: Int[Tensor, "rows columns"],
) -> Mask | dict[str, Mask]:
    """Return what the model takes as `attention_mask`: one mask, or one for each type of its layers.

    Args:
        visible: Which columns of the cache each query may see, sliding windows left aside.
        query_positions, column_positions: Their places in the text, which sliding windows are measured by.

    Raises:
        CapabilityError: the model has layers of another type, such as chunked attention.
    """
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or [])
    if not types <= {_FULL, _SLIDING}:
        raise CapabilityError(
            f"{type(model).__name__} has layers of the type {min(types - {_FULL, _SLIDING})}: it can only be read "
            "as one chain at a time."
        )
    window = getattr(config, "sliding_window", None)
    full = _additive(model, visible)
    if not window or types == {_FULL}:
        return full
    near = query_positions[:, :, None] - column_positions[:, None, :] < window
    sliding = _additive(model, visible & near)
    return {_FULL: full, _SLIDING: sliding} if types else sliding


def _additive(model: PreTrainedModel, visible: Bool[Tensor, "rows queries columns"]) -> Mask:
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    return mask.masked_fill_(~visible.to(model.device), torch.finfo(model.dtype).min)[:, None]
