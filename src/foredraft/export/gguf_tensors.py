"""The weights of a causal language model under llama.cpp's names, in its order of rows and its number formats."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, UserError
from foredraft.core.multiples import refuses_head_size
from foredraft.export.gguf_types import integer_blocks
from foredraft.models.gguf import ARCHITECTURES, INTERLEAVED, LAYER_PARTS
from foredraft.models.int8 import Int8Linear
from foredraft.models.packed import PackedLinear

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PART_OF = {module: part for part, module in LAYER_PARTS.items()}
_BLOCK = 32
# What the gguf package rounds to by itself, with llama.cpp's number for a file of mostly that type. K-quants it only
# reads.
TYPES: Mapping[str, tuple[GGMLQuantizationType, int]] = {
    "f32": (GGMLQuantizationType.F32, 0),
    "f16": (GGMLQuantizationType.F16, 1),
    "bf16": (GGMLQuantizationType.BF16, 32),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
    "q5_1": (GGMLQuantizationType.Q5_1, 9),
    "q5_0": (GGMLQuantizationType.Q5_0, 8),
    "q4_1": (GGMLQuantizationType.Q4_1, 3),
    "q4_0": (GGMLQuantizationType.Q4_0, 2),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a GGUF file holds it.

    Attributes:
        name: llama.cpp's.
        type: A key of TYPES.
        weights: Before rounding, float32.
        data: As stored; bytes for types without a numpy kind.
    """

    name: str
    type: str
    weights: np.ndarray
    data: np.ndarray


def stored_tensors(model: PreTrainedModel, default: str, types: Mapping[str, str]) -> Iterator[StoredTensor]:
    """Yield the tensors of a model, matrices rounded to the type that is asked for them.

    Integers of a rounded draft that the type holds stay what they are. Vectors stay float32. Rows that are no multiple
    of 32 long cannot be rounded in blocks and are kept in f16.

    Args:
        default: A key of TYPES, for matrices that `types` does not name.
        types: Type of a matrix by the name of its module in the model, such as model.layers.0.mlp.up_proj.

    Raises:
        UserError: a type that is not written, or a name that is no matrix of the model.
        ModelError: llama.cpp's form of this architecture does not hold such a model.
    """
    refuse_other_models(model)
    for kind in {default, *types.values()}:
        check_type(kind)
    tied, unnamed = bool(model.config.tie_word_embeddings), set(types)
    for module_name, module in model.named_modules():
        if tied and module_name == "lm_head":
            continue
        for kind, weights in _weights_of(module):
            name = f"{_stem(module_name)}.{kind}"
            array = _ordered(model, name, weights).float().cpu().contiguous().numpy()
            asked = types.get(module_name, default) if array.ndim == 2 else "f32"
            unnamed.discard(module_name)
            rounded = asked if array.shape[-1] % _BLOCK == 0 or asked in ("f32", "f16", "bf16") else "f16"
            blocks = integer_blocks(module, rounded) if kind == "weight" else None
            exact = None if blocks is None else _ordered(model, name, torch.from_numpy(blocks)).contiguous().numpy()
            yield StoredTensor(name, rounded, array, _rounded(array, rounded) if exact is None else exact)
    if unnamed:
        raise UserError(f"{min(unnamed)} is no matrix of the draft that is stored: name others, or leave it out.")


def check_type(name: str) -> None:
    """Raise a UserError unless `name` is a type that is written here."""
    if name not in TYPES:
        raise UserError(
            f"GGUF type {name!r} is not written here; {', '.join(TYPES)} are. For K-quants write f16 and run "
            f"llama-quantize draft.gguf draft-{name}.gguf {name} from llama.cpp."
        )


def refuse_other_models(model: PreTrainedModel) -> None:
    """Raise a ModelError where llama.cpp's form of the architecture does not hold this model."""
    config, kind = model.config, model.config.model_type
    reasons = {
        f"llama.cpp's form of {kind} is not written here, only {' and '.join(ARCHITECTURES)}": kind
        not in ARCHITECTURES,
        f"its positions are scaled ({_rope_type(model)})": _rope_type(model) != "default",
        f"its activation is {getattr(config, 'hidden_act', 'silu')}, not silu": getattr(config, "hidden_act", "silu")
        != "silu",
        "its heads are narrower than llama.cpp takes them for": refuses_head_size(
            "llama.cpp", kind, config.hidden_size, config.num_attention_heads, head_size(model)
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(f"This draft cannot be written as GGUF: {reason}. Make it from a llama or qwen2 target.")


def tensor_name(module_name: str) -> str:
    """Return llama.cpp's name of a module's weight."""
    return f"{_stem(module_name)}.weight"


def head_size(model: PreTrainedModel) -> int:
    """Return the width of an attention head."""
    config = model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope_type(model: PreTrainedModel) -> str:
    return str((model.config.rope_parameters or {}).get("rope_type", "default"))


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight and the bias that a module holds itself, integers multiplied out."""
    if isinstance(module, Int8Linear):
        yield "weight", module.weight.float() * module.weight_scale.float()
    elif isinstance(module, PackedLinear):
        yield "weight", module.unpacked(torch.float32)
    elif (weight := module._parameters.get("weight")) is not None:
        yield "weight", weight.detach()
    if (bias := module._parameters.get("bias")) is not None:
        yield "bias", bias.detach()


def _stem(module_name: str) -> str:
    if module_name in _OUTER:
        return _OUTER[module_name]
    _, _, rest = module_name.partition("model.layers.")
    layer, _, part = rest.partition(".")
    if part not in _PART_OF:
        raise ModelError(f"llama.cpp has no place for {module_name}: this draft cannot be written as GGUF.")
    return f"blk.{layer}.{_PART_OF[part]}"


def _ordered(model: PreTrainedModel, name: str, weights: Tensor) -> Tensor:
    """Interleave the two rotary halves of q and k, as llama.cpp wants them of llama models only."""
    part = name.split(".")[-2]
    if model.config.model_type != "llama" or part not in INTERLEAVED:
        return weights
    heads = model.config.num_attention_heads if part == "attn_q" else model.config.num_key_value_heads
    return weights.view(heads, 2, -1, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)


def _rounded(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f32":
        return array
    return array.astype(np.float16) if kind == "f16" else quantize(array, TYPES[kind][0])
