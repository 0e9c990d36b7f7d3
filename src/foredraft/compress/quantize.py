"""Rounding the weights of a draft: each search unit in a format of its own."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import BFloat16, Float, Int8
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.compress.rounding import round_groups, round_rows
from foredraft.core.errors import ModelError
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.models.compressed import WeightFormat, quantization_config
from foredraft.models.draft import Draft
from foredraft.models.factored import has_factors
from foredraft.models.int8 import ActivationBits, Int8Linear, body_linears
from foredraft.models.packed import PackedLinear
from foredraft.models.units import HEAD, Unit, search_units, unit_bytes

Rounded = tuple[Int8[Tensor, "out in"], BFloat16[Tensor, "out groups"]]
# Told the name of a module, its weight and its format.
Rounder = Callable[[str, Float[Tensor, "out in"], WeightFormat], Rounded]


_BNB_NAMES = {"Linear4bit": "nf4", "Linear8bitLt": "llm-int8"}


@dataclass(frozen=True, slots=True)
class UnitSize:
    """How a unit is stored: `format` is int4-g32, int8 and the like, or a dtype; a tied head has 0 bytes."""

    unit: str
    format: str
    bytes: int


def round_to_nearest(_: str, weight: Float[Tensor, "out in"], weight_format: WeightFormat) -> Rounded:
    """Return the nearest integers in a format, and their scales."""
    if weight_format.group:
        return round_groups(weight, weight_format.bits, weight_format.group)
    return round_rows(weight)


def quantize(
    draft: Draft, formats: Mapping[str, WeightFormat], rounder: Rounder = round_to_nearest, progress: Progress = SILENT
) -> Draft:
    """Return the draft with some units rounded; the others are shared with it, tied if they were.

    The draft given is left as it was. A head that is rounded no longer shares its matrix with the embedding: it is
    untied, and the configuration says so.

    Args:
        draft: Not quantized yet.
        formats: By unit; see plan.unit_formats.
        rounder: Makes the integers of each matrix.

    Raises:
        ModelError: the draft is quantized already, has no linear layers, or computes few rows of a head that is to
            be rounded.
    """
    require_plain(draft)
    units = {unit.name: unit for unit in search_units(draft.model)}
    if HEAD in formats and len(draft.head_token_ids):
        raise ModelError(
            f"The draft computes {len(draft.head_token_ids)} rows of its head, which are kept in 16 bits: "
            "leave the head out of bits, or make the draft with its full head."
        )
    wanted = {module: chosen for name, chosen in formats.items() for module in units[name].modules}
    shared = [draft.model.get_input_embeddings().weight, draft.model.get_output_embeddings().weight]
    # With their linears skipped, only what stays plain is copied.
    skipped = [draft.model.get_submodule(module).weight for module in wanted]
    model = copy.deepcopy(draft.model, {id(weight): weight for weight in [*shared, *skipped]})
    for module, chosen in tracked(progress, "rounding", list(wanted.items()), "matrices"):
        linear = model.get_submodule(module)
        integers, scale = rounder(module, linear.weight.detach(), chosen)
        model.set_submodule(module, rounded_linear(integers, scale, linear.bias, chosen))
    if HEAD in formats:
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    model.config.quantization_config = quantization_config(wanted, plain)
    return Draft(model, draft.head_token_ids)


def quantize_int8(draft: Draft, activation_bits: ActivationBits) -> Draft:
    """Return the draft with every linear layer of its body in 8 bits, one scale a row; see quantize."""
    body = [unit for unit in search_units(draft.model) if unit.layer >= 0]
    return quantize(draft, {unit.name: WeightFormat(8, 0, activation_bits) for unit in body})


def require_plain(draft: Draft) -> None:
    """Raise unless a draft has linear layers and none of them is rounded or factored.

    Raises:
        ModelError: says which.
    """
    if draft.is_quantized:
        raise ModelError(
            "The draft is quantized already, and only plain weights can be measured, cut or rounded: take its parent, "
            "the draft that it was rounded from."
        )
    if has_factors(draft.model):
        raise ModelError(
            "The draft holds factors already, and only plain weights can be measured, cut or rounded: take its parent, "
            "the draft that they were cut from. What trains it is foredraft distill."
        )
    if not body_linears(draft.model):
        raise ModelError(
            f"{type(draft.model).__name__} has no linear layers in its body: there is nothing to quantize."
        )


def rounded_linear(
    integers: Int8[Tensor, "out in"],
    scale: BFloat16[Tensor, "out groups"],
    bias: Float[Tensor, " out"] | None,
    weight_format: WeightFormat,
) -> nn.Module:
    """Return the layer that multiplies by integers as a format stores them."""
    bias = None if bias is None else bias.detach()
    if weight_format.group:
        return PackedLinear.of(integers, scale, bias, weight_format.bits)
    return Int8Linear(integers, scale, bias, weight_format.activation_bits)


def unit_sizes(model: PreTrainedModel) -> list[UnitSize]:
    """Return how each unit of a model is stored."""
    units = search_units(model)
    sizes = unit_bytes(model, units)
    return [UnitSize(unit.name, _format_name(model, unit), sizes[unit.name]) for unit in units]


def _format_name(model: PreTrainedModel, unit: Unit) -> str:
    module = model.get_submodule(unit.modules[0])
    if (name := type(module).__name__) in _BNB_NAMES:
        return _BNB_NAMES[name]
    if isinstance(module, PackedLinear):
        return WeightFormat(module.bits, module.in_features // module.weight_scale.shape[1]).name
    if isinstance(module, Int8Linear):
        return WeightFormat(8, 0, module.activation_bits).name
    return str(module.weight.dtype).removeprefix("torch.")
