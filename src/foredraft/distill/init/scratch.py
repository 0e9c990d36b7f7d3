"""Drafts with random weights: a plain model of the target's family, its embeddings the target's where they can be."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.core.errors import RecipeError
from foredraft.distill.init.sibling import replace_rows
from foredraft.distill.init.widths import Shape, Widths


@dataclass(frozen=True, slots=True)
class Plan:
    """What a new model looks like; widths of 0 are the target's."""

    layers: int
    widths: Widths


def scratch_shape(shape: Shape, widths: Widths, own_ends: bool) -> Shape:
    """Return the shape of a new model beside a target of `shape`.

    Heads keep the target's grouping where their number allows it, and are ungrouped otherwise.

    Raises:
        RecipeError: hidden channels that the heads do not divide, or into heads of an odd size; or the target's
            embeddings asked for at more than its width.
    """
    hidden, heads = widths.hidden or shape.hidden, widths.heads or shape.heads
    group = shape.group if heads % shape.group == 0 else 1
    if hidden % (2 * heads):
        below = hidden - hidden % (2 * heads)
        valid = " or ".join(str(size) for size in (below, below + 2 * heads) if size)
        raise RecipeError(f"hidden: {hidden} does not split into {heads} heads of even size. Nearest: {valid}.")
    if hidden > shape.hidden and not own_ends:
        raise RecipeError(
            f"hidden: {hidden} is more than the {shape.hidden} of the target, whose embeddings the draft takes over. "
            "Set embeddings: random, or ask for less."
        )
    same = (hidden, heads) == (shape.hidden, shape.heads)
    return Shape(hidden, heads, group, shape.head_dim if same else hidden // heads, widths.ffn or shape.ffn)


def init_from_scratch(
    target: PreTrainedModel, plan: Plan, own_ends: bool, generator: torch.Generator
) -> PreTrainedModel:
    """Return a new model of the target's class with random matrices, and gains of 1 and biases of 0.

    Embeddings and head are the target's: its own tensors at its width, their leading principal directions below it.

    Args:
        own_ends: Whether embeddings and head are random too. A training that leaves them alone then has little to
            start from.
        generator: Draws every matrix, from a normal law of the width that the target's configuration states.

    Raises:
        RecipeError: see scratch_shape.
    """
    wanted = scratch_shape(Shape.of(target.config), plan.widths, own_ends)
    config = _config(target.config, plan.layers, wanted)
    with torch.random.fork_rng(devices=[]):
        model = type(target)(config).to(target.dtype).to(target.device).eval()
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    if not own_ends:
        take_ends(model, target, wanted.hidden)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def take_ends(model: PreTrainedModel, target: PreTrainedModel, hidden: int) -> None:
    """Give a new model the target's embeddings and head, or their leading directions where it is narrower."""
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    if hidden == table.shape[1]:
        model.get_input_embeddings().weight = table
        model.get_output_embeddings().weight = head
    else:
        replace_rows(model, _leading(table, hidden), _leading(head, hidden))


def _leading(weight: Float[Tensor, "rows wide"], hidden: int) -> Float[Tensor, "rows hidden"]:
    """Return the rows along the directions in which they differ most from 0, largest first."""
    rows = weight.detach().float()
    directions = torch.linalg.eigh((rows.T @ rows).double()).eigenvectors[:, -hidden:].flip(1)
    return (rows @ directions.float().to(rows.device)).to(weight)


def _config(config: PretrainedConfig, layers: int, shape: Shape) -> PretrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = layers, shape.hidden, shape.ffn
    text.num_attention_heads, text.num_key_value_heads = shape.heads, shape.heads // shape.group
    if getattr(text, "head_dim", None):
        text.head_dim = shape.head_dim
    if isinstance(kinds := getattr(text, "layer_types", None), list):
        text.layer_types = (kinds * layers)[:layers] if len(kinds) < layers else kinds[:layers]
    return config
