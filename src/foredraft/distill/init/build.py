"""A draft as an init step asks for it: cut, narrowed, healed, its factors shared, or new."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.core.errors import ModelError, RecipeError
from foredraft.core.protocols import Answer
from foredraft.distill.init.cut import parse_layers
from foredraft.distill.init.heal import heal_linear
from foredraft.distill.init.scratch import Plan, init_from_scratch, scratch_shape, take_ends
from foredraft.distill.init.shared import bytes_beside_target, fold_factors, share_factors
from foredraft.distill.init.width import narrow
from foredraft.distill.init.widths import Shape, Widths, narrowed_shape
from foredraft.models.calibration import calibration_batches
from foredraft.models.factored import has_factors
from foredraft.models.layers import keep_layers
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.light.scratch import LightShape, light_net
from foredraft.steps import InitStep


@dataclass(frozen=True, slots=True)
class Built:
    """A model to save, and what the manifest says of how it was made: `repairs`, `shared`."""

    model: PreTrainedModel
    options: dict[str, Any]


def build(target: PreTrainedModel, source: PreTrainedModel, step: InitStep, answers: Sequence[Answer]) -> Built:
    """Return what `step` describes; target and source are left as they were.

    Args:
        source: What layers are taken from: the target itself, or another model that speaks its tokens.
        answers: Of the target, for steps that measure.

    Raises:
        RecipeError: layers or widths that the source does not have, or nothing to heal.
        UserError: answers are needed, and there is none.
        ModelError: the source is not built as what the step does to it asks for.
    """
    require_possible(source.config, step)
    if has_factors(source):
        raise ModelError(f"{step.source} holds factors: start from the draft that they were cut from.")
    layers = parse_layers(step.layers, source.config.get_text_config().num_hidden_layers)
    widths = _widths(step)
    if step.source == "scratch":
        generator = torch.Generator().manual_seed(step.seed)
        own_ends = step.embeddings == "random"
        if step.body == "attention":
            return Built(init_from_scratch(target, Plan(len(layers), widths), own_ends, generator), {})
        return Built(_light(target, len(layers), step, own_ends, generator), {})
    model = keep_layers(source, layers, [source.get_input_embeddings().weight, source.get_output_embeddings().weight])
    batches = calibration_batches(answers[: step.calibration]) if step.measures else []
    options: dict[str, Any] = {}
    channels = None
    if widths.given:
        narrowed = narrow(model, widths, batches)
        model, channels = narrowed.model, narrowed.channels
    if step.heal == "linear":
        repairs = heal_linear(model, source, layers, batches, widths.given, channels)
        options["repairs"] = [repair.to_json() for repair in repairs]
    if step.share_rank:
        model = share_factors(model, target, layers, step.share_rank)
        beside = bytes_beside_target(model)
        options["shared"] = {"layers": list(layers), "rank": step.share_rank, "bytes_beside_target": beside}
        model = fold_factors(model)
    return Built(model, options)


def _light(
    target: PreTrainedModel, layers: int, step: InitStep, own_ends: bool, generator: torch.Generator
) -> LightForCausalLM:
    wide = scratch_shape(Shape.of(target.config), _widths(step), own_ends)
    shape = LightShape(step.body, layers, wide.hidden, wide.heads, wide.ffn, step.kernel, step.active)
    model = light_net(target, shape, generator)
    if not own_ends:
        take_ends(model, target, wide.hidden)
    return model


def require_possible(config: PretrainedConfig, step: InitStep) -> None:
    """Raise what `build` would raise for the settings alone.

    Args:
        config: Of the model that layers are taken from.

    Raises:
        RecipeError: layers or widths that the model cannot have, or nothing to heal.
    """
    layers = parse_layers(step.layers, config.get_text_config().num_hidden_layers)
    if step.source == "scratch":
        shape = scratch_shape(Shape.of(config), _widths(step), step.embeddings == "random")
        if step.active > shape.ffn:
            raise RecipeError(
                f"active: {step.active} is more than the {shape.ffn} feed-forward channels. Ask for less."
            )
        return
    if step.is_narrower:
        narrowed_shape(Shape.of(config), _widths(step))
    uncut = layers == tuple(range(config.get_text_config().num_hidden_layers))
    if step.heal == "linear" and uncut and not step.is_narrower:
        raise RecipeError("heal: linear has nothing to repair where every layer is kept at its width: leave it out.")


def _widths(step: InitStep) -> Widths:
    return Widths(step.hidden, step.heads, step.ffn)
