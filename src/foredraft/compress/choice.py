"""What a search has chosen so far: what is left of the draft that it began with, and what a step of that costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.compress.quantize import round_to_nearest
from foredraft.compress.rounding import product
from foredraft.core.roofline import PassFacts
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.layers import keep_layers
from foredraft.models.passes import pass_facts
from foredraft.models.units import EMBEDDING, Unit, search_units

_PLAIN_BYTES = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A compressed draft, as what is left of the one that the search began with.

    Attributes:
        layers: That stay, by their first numbers.
        bits: Of units that are rounded, by their first names.
        ffn: Feed-forward channels kept; 0 for all.
        rows: Rows of the head computed; 0 for as many as at first.
    """

    layers: tuple[int, ...]
    bits: Mapping[str, int] = field(default_factory=dict)
    ffn: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Cutters:
    """What cuts a draft otherwise than by layers; made where calibration and text are known.

    Attributes:
        narrow: Returns a narrower copy of a model of some of the layers, named by their first numbers, with so many
            feed-forward channels.
        rows: Returns the rows of a head of so many rows, increasing.
    """

    narrow: Callable[[PreTrainedModel, Sequence[int], int], PreTrainedModel]
    rows: Callable[[int], Int[Tensor, " kept"]]


def cut_draft(draft: Draft, choice: Choice, cutters: Cutters) -> Draft:
    """Return the draft of a choice before any rounding; weights that are whole are shared with the first one."""
    model = keep_layers(draft.model, choice.layers, shared=list(draft.model.parameters()))
    if choice.ffn:
        model = cutters.narrow(model, choice.layers, choice.ffn)
    return Draft(model, cutters.rows(choice.rows) if choice.rows else draft.head_token_ids)


def formats_of(draft: Draft, choice: Choice, group: int) -> dict[str, WeightFormat]:
    """Return the formats of a choice by the names that units have once its layers are cut out."""
    renumbered = {old: new for new, old in enumerate(choice.layers)}
    found = {}
    for unit in search_units(draft.model):
        if (bits := choice.bits.get(unit.name, 16)) != 16 and (unit.layer < 0 or unit.layer in renumbered):
            name = unit.name if unit.layer < 0 else f"layers.{renumbered[unit.layer]}.{unit.part}"
            found[name] = WeightFormat(bits, group if bits == 4 else 0)
    return found


def simulated(plain: Draft, formats: Mapping[str, WeightFormat]) -> Draft:
    """Return a draft with plain weights that hold what the integers of its formats stand for; the rest is shared."""
    layers = range(plain.model.config.get_text_config().num_hidden_layers)
    model = keep_layers(plain.model, layers, shared=list(plain.model.parameters()))
    for module, weight in rounded_weights(plain.model, formats):
        model.get_submodule(module).weight = nn.Parameter(weight, requires_grad=False)
    return Draft(model, plain.head_token_ids)


def rounded_weights(
    model: PreTrainedModel, formats: Mapping[str, WeightFormat]
) -> Iterator[tuple[str, Float[Tensor, "out in"]]]:
    """Yield each matrix of the units named, by its module, as what its nearest integers stand for."""
    for unit in search_units(model):
        for module in unit.modules if unit.name in formats else ():
            weight = model.get_submodule(module).weight.detach()
            yield module, product(*round_to_nearest(module, weight, formats[unit.name]))


@contextmanager
def swapped_weights(model: PreTrainedModel, weights: Mapping[str, Float[Tensor, "out in"]]) -> Iterator[None]:
    """Give some modules other weights for a while. An embedding that is tied to a head stays what it is."""
    linears = {module: model.get_submodule(module) for module in weights}
    kept = {module: linear.weight for module, linear in linears.items()}
    try:
        for module, linear in linears.items():
            linear.weight = nn.Parameter(weights[module], requires_grad=False)
        yield
    finally:
        for module, linear in linears.items():
            linear.weight = kept[module]


def step_facts(plain: Draft, formats: Mapping[str, WeightFormat]) -> PassFacts:
    """Return what a step of a draft moves and computes once it is rounded, with its plain weights in 16 bits."""
    facts = pass_facts(plain.model, len(plain.head_token_ids))
    head = plain.model.get_output_embeddings()
    share = len(plain.head_token_ids) / head.out_features or 1.0
    read = 0.0
    for unit in search_units(plain.model):
        if unit.name != EMBEDDING:
            bytes_ = _stored_bytes(plain.model, unit, formats.get(unit.name))
            read += bytes_ * (share if plain.model.get_submodule(unit.modules[0]) is head else 1.0)
    kv_bytes = facts.kv_bytes_per_token * _PLAIN_BYTES / plain.model.dtype.itemsize
    return replace(facts, weight_bytes=read, kv_bytes_per_token=kv_bytes, dtype="bfloat16")


def count_weights(model: PreTrainedModel, unit: Unit) -> int:
    """Return how many weights the matrices of a unit hold."""
    return sum(model.get_submodule(module).weight.numel() for module in unit.modules)


def _stored_bytes(model: PreTrainedModel, unit: Unit, weight_format: WeightFormat | None) -> float:
    if weight_format is None:
        return float(count_weights(model, unit) * _PLAIN_BYTES)
    weights = [model.get_submodule(module).weight for module in unit.modules]
    scales = sum(weight.numel() / (weight_format.group or weight.shape[1]) for weight in weights)
    return count_weights(model, unit) * weight_format.bits / 8 + scales * _PLAIN_BYTES
