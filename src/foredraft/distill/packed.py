"""Run a transformers model over packed text, through its pluggable attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.packing import Pack, Row

_NAME = "foredraft_packed"

# Is shown the layer's number, queries and keys of each group as [1, heads, tokens, width], its masks, and the scale.
Watch = Callable[[int, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], float | None], None]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One of the two passes over a pack.

    Attributes:
        row: What is read.
        stems: For each attention module the keys and values of each group's stem; the first pass fills it.
        watch: Called by every layer.
    """

    row: Row
    stems: dict[nn.Module, list[tuple[Tensor, Tensor]]]
    watch: Watch | None = None


def run_body(
    model: PreTrainedModel,
    pack: Pack,
    watch: Watch | None = None,
    body: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Return the output of the model's body over the branches of a pack; `options` as of its forward.

    The stems are read first, without a gradient; embeddings get one only if they ask for it.

    Args:
        watch: Sees the attention of the branches, with its gradient.
        body: Runs the model's body, where that is not the model's own base_model.

    Raises:
        ModelError: the model's attention cannot be replaced, or looks back over a window only.
    """
    stems: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    body = body or model.base_model
    with packed_attention(model):
        if len(pack.stems):
            with torch.no_grad():
                _run(model, body, _Reading(pack.stems, stems))
        return _run(model, body, _Reading(pack.branches, stems, watch), **options)


def _run(model: PreTrainedModel, body: Callable[..., Any], reading: _Reading, **options: Any) -> Any:
    embeddings = model.get_input_embeddings()
    with torch.set_grad_enabled(torch.is_grad_enabled() and embeddings.weight.requires_grad):
        embedded = embeddings(reading.row.token_ids[None])
    return body(
        inputs_embeds=embedded, position_ids=reading.row.position_ids[None], use_cache=False, reading=reading, **options
    )


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attend as packed text asks; a gradient that computes layers again needs it to last until then."""
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
    reading: _Reading,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    row = reading.row
    longest = max(mask.shape[1] for mask in row.masks)
    if sliding_window is not None and longest > sliding_window:
        raise ModelError(f"A text of {longest} tokens is longer than the model's attention window, {sliding_window}.")
    shared = query.shape[1] != key.shape[1]
    queries, keys, values = (part.split(row.lengths, 2) for part in (query, key, value))
    if module in reading.stems:
        keys, values = (
            [torch.cat(pair, 2) for pair in zip(stem, parts, strict=True)]
            for stem, parts in zip(zip(*reading.stems[module], strict=True), (keys, values), strict=True)
        )
    else:
        reading.stems[module] = list(zip(keys, values, strict=True))
    if reading.watch is not None:
        reading.watch(module.layer_idx, queries, keys, row.masks, scaling)
    outputs = [
        scaled_dot_product_attention(
            some_queries, some_keys, some_values, attn_mask=mask, scale=scaling, enable_gqa=shared
        )
        for some_queries, some_keys, some_values, mask in zip(queries, keys, values, row.masks, strict=True)
        if len(mask)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
