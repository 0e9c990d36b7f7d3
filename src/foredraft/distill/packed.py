"""Run a transformers model over packed text, through its pluggable attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.data import Block, Pack

_NAME = "foredraft_packed"


def run_body(model: PreTrainedModel, pack: Pack, embedded: Float[Tensor, "1 tokens hidden"], **options: Any) -> Any:
    """Return the output of the model's body over a pack whose tokens are already embedded.

    Raises:
        ModelError: its attention cannot be replaced, or looks back over a window only.
    """
    with _packed_attention(model):
        return model.base_model(
            inputs_embeds=embedded, position_ids=pack.position_ids[None], use_cache=False, blocks=pack.blocks, **options
        )


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, _attend)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        raise ModelError(
            f"{type(model).__name__} does not let its attention be replaced; such models cannot be trained."
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 groups tokens width"],
    value: Float[Tensor, "1 groups tokens width"],
    attention_mask: None,
    blocks: tuple[Block, ...],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    lengths = [block.end - block.start for block in blocks]
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ModelError(
            f"A text of {max(lengths)} tokens is longer than the model's attention window, {sliding_window}."
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs = [
        scaled_dot_product_attention(query, key, value, attn_mask=block.mask, scale=scaling)
        for block, query, key, value in zip(
            blocks, query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
        )
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
