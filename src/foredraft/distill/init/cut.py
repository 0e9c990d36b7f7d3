"""Drafts cut out of the target: some of its layers, with its embeddings, final norm and head."""

import re
from collections import Counter
from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import RecipeError
from foredraft.models.draft import Draft
from foredraft.models.head import NO_IDS
from foredraft.models.layers import keep_layers


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that `text` names, of a target with `num_layers`, in ascending order.

    Args:
        text: `all`, or terms joined by `+` or `,`: first-6, last-2, every-5 (0, 5, 10, ...), or numbers from 0.
        num_layers: Layers of the target.

    Raises:
        RecipeError: a term that is none of these, a layer that the target lacks, or one named twice.
    """
    if text.strip() == "all":
        return tuple(range(num_layers))
    layers: list[int] = []
    for term in re.split(r"[+,]", text):
        match = re.fullmatch(r"\s*(?:(first|last|every)-)?(\d+)\s*", term)
        if match is None:
            raise RecipeError(
                f"layers: {term.strip()!r} is no layer of a target: write first-6, last-2, every-5, numbers such as "
                "0,1,28, or several of these joined by +."
            )
        layers += _term(match[1] or "", int(match[2]), num_layers)
    twice = [layer for layer, count in Counter(layers).items() if count > 1]
    if twice:
        raise RecipeError(f"layers: {text!r} names layer {min(twice)} twice, of a target with {num_layers} layers.")
    return tuple(sorted(layers))


def _term(word: str, number: int, num_layers: int) -> Sequence[int]:
    if word in ("first", "last") and not 1 <= number <= num_layers:
        raise RecipeError(f"layers: {word}-{number} asks for {number} layers; the target has {num_layers}.")
    if word == "every" and not 1 <= number <= num_layers:
        raise RecipeError(f"layers: every-{number} needs a step from 1 to the target's {num_layers} layers.")
    if word == "" and number >= num_layers:
        raise RecipeError(f"layers: there is no layer {number}; the target has {num_layers}, numbered from 0.")
    return {
        "first": range(number),
        "last": range(num_layers - number, num_layers),
        "every": range(0, num_layers, max(number, 1)),
        "": [number],
    }[word]


def init_from_target(
    target: PreTrainedModel, layers: Sequence[int], head_token_ids: Int[Tensor, " kept"] = NO_IDS
) -> Draft:
    """Return a draft of the given layers of the target, which is left as it was.

    The model has a plain configuration that stock transformers reloads. Its embeddings and head are
    the target's own tensors, not copies: train neither.

    Args:
        target: A decoder that keeps its layers in one list, as Llama and Qwen2 do.
        layers: Layers of the target, from 0, in the order in which the draft runs them.
        head_token_ids: Rows of the head that the draft computes, increasing; empty for all.
    """
    shared = [target.get_input_embeddings().weight, target.get_output_embeddings().weight]
    return Draft(keep_layers(target, layers, shared), head_token_ids)
