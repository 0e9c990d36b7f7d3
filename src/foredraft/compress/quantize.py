"""Rounding the weights of a draft to 8 bits: to the nearest, one scale a row, no calibration."""

import copy

import torch
from jaxtyping import BFloat16, Float, Int8
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.draft import Draft
from foredraft.models.int8 import ActivationBits, Int8Linear, body_linears, int8_plan

_LARGEST = 127
_SMALLEST = torch.finfo(torch.float32).tiny


def quantize_int8(draft: Draft, activation_bits: ActivationBits) -> Draft:
    """Return the draft with every linear layer of its body in 8 bits; embeddings and head stay as they are.

    The draft given is left as it was; its embeddings and head are shared with it, tied if they were.

    Args:
        draft: Not quantized yet.
        activation_bits: 16 rounds weights only. 8 also rounds what each layer reads, as runtimes with
            integer products do; it costs acceptance.

    Raises:
        ModelError: the draft is quantized already, or has no linear layers.
    """
    if getattr(draft.model.config, "quantization_config", None):
        raise ModelError("The draft is quantized already, and rounding it again only loses: quantize its parent.")
    linears = body_linears(draft.model)
    if not linears:
        raise ModelError(
            f"{type(draft.model).__name__} has no linear layers in its body: there is nothing to quantize."
        )
    shared = [draft.model.get_input_embeddings().weight, draft.model.get_output_embeddings().weight]
    replaced = [linear.weight for linear in linears.values()]
    model = copy.deepcopy(draft.model, {id(weight): weight for weight in [*shared, *replaced]})
    for name, linear in body_linears(model).items():
        weight, scale = round_rows(linear.weight.detach())
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, Int8Linear(weight, scale, bias, activation_bits))
    model.config.quantization_config = int8_plan(model, activation_bits)
    return Draft(model, draft.head_token_ids)


def round_rows(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], BFloat16[Tensor, "out 1"]]:
    """Return the nearest integers in [-127, 127] and the scale of each row, such that weight is near their product.

    A scale is a bfloat16 number, so that every runtime multiplies by the same one, whatever it computes
    in. No entry is off by more than half of it.
    """
    scale = (weight.abs().amax(-1, keepdim=True).double() / _LARGEST).clamp_min(_SMALLEST).bfloat16()
    return (weight.float() / scale.float()).round().to(torch.int8), scale
