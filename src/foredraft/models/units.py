"""Search units: the parts of a draft that are stored in one format, because runtimes run each of them as one matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from foredraft.models.int8 import Int8Linear
from foredraft.models.layers import layer_stack
from foredraft.models.packed import PackedLinear

EMBEDDING, HEAD = "embedding", "head"
_UNIT_OF = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up"} | {
    "up_proj": "gate_up",
    "down_proj": "down",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that share a format.

    Attributes:
        name: embedding, head, or layers.N. and one of qkv, o, gate_up, down; other matrices are units of their own.
        modules: Their names in the model.
    """

    name: str
    modules: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Number of its layer; -1 for embedding and head."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else -1

    @property
    def part(self) -> str:
        """Its name without the layer."""
        return self.name.rpartition(".")[2]


def search_units(model: PreTrainedModel) -> tuple[Unit, ...]:
    """Return all units of a model: the embedding, the layers in order, the head. Rounded layers count like plain ones.

    Raises:
        ModelError: the architecture does not keep its layers in one list.
    """
    names = {id(module): name for name, module in model.named_modules()}
    units = [Unit(EMBEDDING, (names[id(model.get_input_embeddings())],))]
    for index, layer in enumerate(layer_stack(model)):
        parts: dict[str, list[str]] = {}
        for name, module in layer.named_modules():
            if _is_linear(module):
                parts.setdefault(part_of(name), []).append(names[id(module)])
        units += [Unit(f"layers.{index}.{part}", tuple(modules)) for part, modules in parts.items()]
    return (*units, Unit(HEAD, (names[id(model.get_output_embeddings())],)))


def part_of(module: str) -> str:
    """Return the part of a layer that a matrix belongs to; those of one part read the same input."""
    last = module.rpartition(".")[2]
    return _UNIT_OF.get(last, last)


def unit_weights(model: PreTrainedModel, unit: Unit) -> list[nn.Parameter]:
    """Return the plain matrices of a unit."""
    return [model.get_submodule(module).weight for module in unit.modules]


def unit_bytes(model: PreTrainedModel, units: Sequence[Unit]) -> Mapping[str, int]:
    """Return the bytes of each unit as the model holds it. A head tied to the embedding holds none of its own."""
    seen: set[int] = set()
    found = {}
    for unit in units:
        held = [weight for module in unit.modules for weight in model.get_submodule(module).parameters()]
        found[unit.name] = sum(weight.numel() * weight.element_size() for weight in held if id(weight) not in seen)
        seen |= {id(weight) for weight in held}
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Int8Linear | PackedLinear)
