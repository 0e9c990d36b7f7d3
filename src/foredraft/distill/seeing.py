"""A model's inside as matching compares it: hidden states and attention over packed text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.distill.packed import run_body
from foredraft.distill.packing import Pack


@dataclass(frozen=True, slots=True)
class Asked:
    """What is looked at beside the last hidden state.

    Attributes:
        states: Whether the states of all layers are.
        attention: Layers whose attention is, from 0.
    """

    states: bool = False
    attention: frozenset[int] = frozenset()


NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class Attention:
    """Who attends to whom in one group of texts, in one layer.

    Attributes:
        logprobs: log of each token's attention over its stem and branches; 0 where it cannot look.
        blocked: Where it cannot look.
    """

    logprobs: Float[Tensor, "heads tokens keys"]
    blocked: Bool[Tensor, "tokens keys"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a model made of the branches of a pack.

    Attributes:
        last: State behind the last layer and the final norm.
        states: Embeddings, then the state behind each layer, the last one being `last`; empty unless asked for.
        attention: By layer, of each group.
    """

    last: Float[Tensor, "1 tokens hidden"]
    states: Sequence[Float[Tensor, "1 tokens hidden"]]
    attention: Mapping[int, Sequence[Attention]]


def look(model: PreTrainedModel, pack: Pack, asked: Asked, **options: Any) -> Seen:
    """Run a model over a pack and return what was asked for; `options` as of run_body."""
    attention: dict[int, list[Attention]] = {}

    def watch(
        layer: int,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        masks: Sequence[Tensor],
        scale: float | None,
    ) -> None:
        if layer in asked.attention:
            attention[layer] = [
                _attention(*group, scale) for group in zip(queries, keys, masks, strict=True) if len(group[2])
            ]

    watching = watch if asked.attention else None
    output = run_body(model, pack, watch=watching, output_hidden_states=asked.states, **options)
    return Seen(output.last_hidden_state, output.hidden_states or (), attention)


def _attention(
    queries: Float[Tensor, "1 heads tokens width"],
    keys: Float[Tensor, "1 groups keys width"],
    mask: Float[Tensor, "tokens keys"],
    scale: float | None,
) -> Attention:
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    scores = queries[0].float() @ keys[0].float().mT * (scale or queries.shape[-1] ** -0.5)
    blocked = mask == float("-inf")
    return Attention(torch.log_softmax(scores + mask, -1).masked_fill(blocked, 0.0), blocked)
