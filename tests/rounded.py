"""Tiny drafts whose units have formats of their own, and what their integers stand for, written with torch alone."""

import torch
from transformers import PreTrainedModel

from foredraft.compress.plan import unit_formats
from foredraft.compress.quantize import quantize
from foredraft.models.draft import Draft
from foredraft.models.units import search_units
from tests.tiny import tiny_model

MIXED = {"layers.0.*": 16, "layers.*.qkv": 8, "layers.1.down": "8/16", "head": 4, "layers.*": 4}
CASES = [("llama", True, MIXED), ("llama", False, MIXED), ("qwen2", True, 4), ("qwen2", True, {"head": "4/16"})]


def quantized(family: str, tied: bool, bits: object) -> Draft:
    model = tiny_model(family=family, tied=tied)
    return quantize(Draft(model), unit_formats(model, search_units(model), bits, 32))


def reference(family: str, tied: bool, bits: object) -> PreTrainedModel:
    """Return a plain float32 model whose weights are what rounding leaves, written with torch alone."""
    model = tiny_model(family=family, tied=tied)
    formats = unit_formats(model, search_units(model), bits, 32)
    if "head" in formats:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for unit in search_units(model):
        for module in unit.modules if unit.name in formats else ():
            weight, chosen = model.get_submodule(module).weight, formats[unit.name]
            rows = weight.data.view(-1, chosen.group or weight.shape[1])
            steps = 127 if not chosen.group else 2 ** (chosen.bits - 1) - 0.5
            exact = (rows.abs().amax(1, keepdim=True) / steps).clamp_min(1e-30)
            scale = exact.bfloat16().float()
            if chosen.group:
                scale = torch.where(scale < exact, scale + 2.0 ** (scale.log2().floor() - 7), scale)
            low = -(2 ** (chosen.bits - 1))
            weight.data = ((rows / scale).round().clamp(low, -low - 1) * scale).view_as(weight)
    return model
