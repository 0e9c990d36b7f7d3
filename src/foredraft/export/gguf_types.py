"""Which type each matrix of a GGUF file gets, by search unit, and integers that a type holds as they are."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Int8, UInt8
from torch import nn
from transformers import PreTrainedModel

from foredraft.core.errors import RecipeError
from foredraft.models.int8 import Int8Linear
from foredraft.models.packed import PackedLinear
from foredraft.models.units import search_units

_BLOCK = 32
_ZERO = {"q4_0": 8, "q8_0": 0}


def module_types(model: PreTrainedModel, given: Mapping[str, str]) -> dict[str, str]:
    """Return the type of each matrix, in small letters, by its module.

    Args:
        given: Types by pattern of units, {layers.*.down: q8_0, layers.*: q4_0, head: q6_k}, of which the first
            that matches decides. What none matches is stored as it is: 8-bit units as q8_0, 4-bit ones as q4_0,
            bfloat16 as bf16, float32 as f16.

    Raises:
        RecipeError: a type that is not known, a pattern that matches nothing, or rows that the blocks of a type do not
            divide; llama.cpp would store another, larger type in silence.
    """
    for pattern, kind in given.items():
        if kind.upper() not in GGMLQuantizationType.__members__:
            raise RecipeError(f"{pattern}: {kind!r} is no GGUF type, such as f16, q8_0, q4_0, q4_k or q6_k.")
    found, used = {}, set()
    units = {module: unit.name for unit in search_units(model) for module in unit.modules}
    for module, unit in units.items():
        matching = [pattern for pattern in given if fnmatchcase(unit, pattern)][:1]
        used.update(matching)
        found[module] = given[matching[0]].lower() if matching else stored_type(model.get_submodule(module))
        _refuse_odd_rows(unit, found[module], _inputs(model.get_submodule(module)))
    unused = [pattern for pattern in given if pattern not in used]
    if unused:
        raise RecipeError(f"The pattern {unused[0]!r} matches no unit, such as layers.0.qkv, head or embedding.")
    return found


def stored_type(module: nn.Module) -> str:
    """Return the type that holds a module as it is, or for float32 the half of it."""
    if isinstance(module, PackedLinear):
        return "q4_0" if module.bits == 4 else "q8_0"
    if isinstance(module, Int8Linear):
        return "q8_0"
    return "bf16" if str(module.weight.dtype) == "torch.bfloat16" else "f16"


def integer_blocks(module: nn.Module, kind: str) -> UInt8[np.ndarray, "out bytes"] | None:
    """Return the rows of a rounded module as a type lays them out, with its very integers and scales.

    A block is a scale in float16 and the integers of 32 inputs, in q4_0 two of them to a byte, the later half of the
    block in the upper bits.

    Returns:
        None where the module is not rounded, or not so that the type holds it exactly.
    """
    if isinstance(module, Int8Linear) and kind == "q8_0":
        scales = module.weight_scale.detach().float().expand(-1, module.in_features // _BLOCK)
        return _blocks(module.weight.detach().cpu().numpy(), scales.cpu().numpy(), kind)
    if not isinstance(module, PackedLinear) or kind != stored_type(module):
        return None
    group = module.in_features // module.weight_scale.shape[1]
    if group % _BLOCK:
        return None
    scales = module.weight_scale.detach().float().repeat_interleave(group // _BLOCK, 1)
    return _blocks(module.integers().cpu().numpy(), scales.cpu().numpy(), kind)


def _blocks(
    integers: Int8[np.ndarray, "out in"], scales: np.ndarray, kind: str
) -> UInt8[np.ndarray, "out bytes"] | None:
    halves = scales.astype(np.float16)
    if integers.shape[1] % _BLOCK or not np.array_equal(halves.astype(np.float32), scales):
        return None  # A scale beyond the range of float16.
    held = (integers.reshape(len(integers), -1, _BLOCK).astype(np.int16) + _ZERO[kind]).astype(np.uint8)
    low, high = held[..., : _BLOCK // 2], held[..., _BLOCK // 2 :]
    parts = [low | (high << 4)] if kind == "q4_0" else [low, high]
    return np.concatenate([halves[..., None].view(np.uint8), *parts], axis=-1).reshape(len(integers), -1)


def _inputs(module: nn.Module) -> int:
    return int(module.embedding_dim if isinstance(module, nn.Embedding) else module.in_features)


def _refuse_odd_rows(unit: str, kind: str, inputs: int) -> None:
    block = int(GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][0])
    if inputs % block:
        raise RecipeError(
            f"{kind} holds blocks of {block} inputs, and rows of {unit} have {inputs}: llama.cpp would store another, "
            f"larger type. Choose {'q4_0 or q8_0' if inputs % _BLOCK == 0 else 'f16'}, or cut the width to a multiple "
            f"of {block}."
        )
