"""A draft in the process of its target: what the two have in common is held once."""

import torch
from transformers import PreTrainedModel


def hold_once(draft: PreTrainedModel, target: PreTrainedModel) -> int:
    """Let a draft, in place, read the target's embeddings and head where its own are the same; return the bytes spared.

    Figures and steps stay what they are: a step reads as much, wherever it lies.
    """
    spared = 0
    for end in ("get_input_embeddings", "get_output_embeddings"):
        own, theirs = (getattr(getattr(model, end)(), "weight", None) for model in (draft, target))
        if own is None or theirs is None or own.data_ptr() == theirs.data_ptr():
            continue
        if (own.dtype, own.device, own.shape) == (theirs.dtype, theirs.device, theirs.shape) and torch.equal(
            own, theirs
        ):
            own.data = theirs.data
            spared += own.numel() * own.element_size()
    return spared
