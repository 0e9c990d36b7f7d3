"""Bits by search unit: a mapping of patterns, of which the first that matches a unit decides."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from foredraft.core.bits import parse_bits
from foredraft.core.errors import RecipeError
from foredraft.models.compressed import WeightFormat
from foredraft.models.int8 import ActivationBits
from foredraft.models.units import EMBEDDING, HEAD, Unit, unit_weights

Plan = int | str | Mapping[str, int | str] | Sequence[tuple[str, int | str]]


def unit_formats(
    model: PreTrainedModel,
    units: Sequence[Unit],
    bits: Plan,
    group: int,
    activation_bits: ActivationBits = 16,
) -> dict[str, WeightFormat]:
    """Return the format of each unit that is rounded.

    Args:
        bits: A number for all units of the body; `chapter`; or patterns such as layers.*.down, head or * with bits, 4,
            8 or 16, or bits/group, 8/32. Units that no pattern matches keep 16 bits, and so does the embedding,
            which no runtime named here loads packed, whatever a wildcard says.
        group: Inputs that share a scale in 4 bits; 8 bits have a scale a row unless a pattern names a group.

    Raises:
        RecipeError: a pattern that matches nothing, bits that are not known, an embedding in fewer bits, or a group
            that does not divide the inputs of a matrix; the message names the groups that do.
    """
    patterns = _patterns(bits, units)
    unused = [pattern for pattern in patterns if not any(fnmatchcase(unit.name, pattern) for unit in units)]
    if unused:
        known = f"{units[0].name}, {units[1].name} .. {units[-2].name}, {units[-1].name}"
        raise RecipeError(f"bits: the pattern {unused[0]!r} matches no unit. Units are {known}.")
    found: dict[str, WeightFormat] = {}
    for unit in units:
        matched = next((pattern for pattern in patterns if fnmatchcase(unit.name, pattern)), None)
        weight_format = _read_format(patterns[matched], group, activation_bits) if matched is not None else None
        if weight_format is None:
            continue
        if unit.name != EMBEDDING:
            _refuse_odd_group(model, unit, weight_format)
            found[unit.name] = weight_format
        elif matched == EMBEDDING:
            raise RecipeError(
                "bits: the embedding stays in 16 bits: transformers and vLLM load no packed table, and a step reads "
                "one row of it. Name the head instead; where they are tied, it gets a copy of its own in fewer bits."
            )
    return found


def _patterns(bits: Plan, units: Sequence[Unit]) -> Mapping[str, int | str]:
    if not isinstance(bits, int | str):
        return dict(bits)
    if bits == "chapter":
        return _chapter(1 + max(unit.layer for unit in units))
    return {"layers.*": bits}


def _chapter(num_layers: int) -> dict[str, int | str]:
    """Return embeddings and head in 16 bits, the middle third of the layers in 8, the others in 4: a plan to beat."""
    edge = num_layers // 3
    middle: dict[str, int | str] = {f"layers.{layer}.*": 8 for layer in range(edge, num_layers - edge)}
    return {EMBEDDING: 16, HEAD: 16, **middle, "layers.*": 4}


def _read_format(value: int | str, group: int, activation_bits: ActivationBits) -> WeightFormat | None:
    """Return the format that a number or bits/group stands for; None for 16 bits."""
    try:
        bits, own_group = parse_bits(value)
    except ValueError as error:
        raise RecipeError(f"bits: {error}.") from error
    if bits == 16:
        return None
    size = own_group or (group if bits == 4 else 0)
    if bits == 4 and not size:
        raise RecipeError("group: 4 bits need a group of inputs to a scale, such as 32.")
    return WeightFormat(bits, size, activation_bits if not size else 16)


def _refuse_odd_group(model: PreTrainedModel, unit: Unit, weight_format: WeightFormat) -> None:
    for weight in unit_weights(model, unit):
        inputs = weight.shape[1]
        if weight_format.group and inputs % weight_format.group:
            fitting = [size for size in (16, 32, 64, 128, 256) if inputs % size == 0]
            raise RecipeError(
                f"group: {weight_format.group} does not divide the {inputs} inputs of {unit.name}. "
                f"Groups that do: {', '.join(map(str, fitting)) or 'none of 16 to 256'}."
            )
