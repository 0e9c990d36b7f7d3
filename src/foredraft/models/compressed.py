"""Folders of rounded weights in the layout of compressed-tensors: what config.json says of them, and reading them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.models.assembled import assembled
from foredraft.models.int8 import ActivationBits, Int8Linear
from foredraft.models.packed import PackedLinear
from foredraft.models.quantized import quantization_plan

_MIXED = "mixed-precision"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of a layer are stored.

    Attributes:
        bits: 4 or 8.
        group: Inputs that share a scale; 0: all inputs of an output, for 8 bits only.
        activation_bits: 8 where inputs are rounded too, with group 0 only.
    """

    bits: int
    group: int
    activation_bits: ActivationBits = 16

    @property
    def layout(self) -> str:
        """Name of the format in compressed-tensors."""
        return "pack-quantized" if self.group else "int-quantized"

    @property
    def name(self) -> str:
        return f"int{self.bits}" + (f"-g{self.group}" if self.group else "") + ("-a8" * (self.activation_bits == 8))

    def to_json(self) -> dict[str, Any]:
        """Return a config group without its targets."""
        integers = {"num_bits": self.bits, "type": "int", "symmetric": True}
        strategy = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        group = {"weights": {**integers, **strategy, "dynamic": False}, "format": self.layout}
        if self.activation_bits == 8:
            group["input_activations"] = {**integers, "strategy": "token", "dynamic": True}
        return group

    @staticmethod
    def read(group: Mapping[str, Any]) -> "WeightFormat | None":
        """Return the format of a config group; None for one that to_json does not write."""
        weights = group.get("weights") or {}
        bits, size = weights.get("num_bits"), weights.get("group_size") or 0
        activation_bits: ActivationBits = 8 if group.get("input_activations") else 16
        found = WeightFormat(bits, size, activation_bits) if (bits in (4, 8) and size) or bits == 8 else None
        stated = {key: value for key, value in group.items() if key != "targets"}
        return found if found is not None and found.to_json() == stated else None


def quantization_config(formats: Mapping[str, WeightFormat], ignore: list[str]) -> dict[str, Any]:
    """Return the quantization_config of a model.

    Args:
        formats: By module, such as model.layers.0.mlp.up_proj; modules not named keep plain weights.
        ignore: Linear layers that keep plain weights.
    """
    groups: dict[str, Any] = {}
    for module, weight_format in formats.items():
        group = groups.setdefault(weight_format.name, {"targets": [], **weight_format.to_json()})
        group["targets"].append(_target(module))
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }


def is_compressed(path: Path) -> bool:
    """Whether a model folder holds what load_compressed reads."""
    return bool(_read_groups(path))


def load_compressed(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of a folder for which is_compressed holds; `dtype` is that of what is not rounded.

    Raises:
        ModelError: its weights are not those that its config.json asks for.
    """
    groups = _read_groups(path)

    def swap(name: str, linear: nn.Linear, _: Mapping[str, torch.Tensor]) -> nn.Module:
        weight_format = _format_of(name, groups)
        return linear if weight_format is None else _empty(linear, weight_format)

    return assembled(path / "model.safetensors", dtype, swap)


@dataclass(frozen=True, slots=True)
class _Group:
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    weight_format: WeightFormat

    def takes(self, name: str) -> bool:
        return name not in self.ignore and any(
            target == "Linear" or (target.startswith("re:") and re.match(target[3:], name)) for target in self.targets
        )


def _target(module: str) -> str:
    """Return what matches a module wherever a runtime puts the model: from its list of layers on."""
    name = module[module.find("layers.") :] if "layers." in module else module.rpartition(".")[2]
    return f"re:.*{re.escape(name)}$"


def _read_groups(path: Path) -> list[_Group]:
    """Return the config groups of a folder, none if it holds one that this package does not write."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    plan = quantization_plan(config)
    if plan.get("quant_method") != "compressed-tensors" or plan.get("quantization_status") != "compressed":
        return []
    found = []
    for group in plan.get("config_groups", {}).values():
        weight_format = WeightFormat.read(group)
        if weight_format is None:
            return []
        found.append(_Group(tuple(group.get("targets", ())), tuple(plan.get("ignore") or ()), weight_format))
    return found


def _format_of(name: str, groups: list[_Group]) -> WeightFormat | None:
    return next((group.weight_format for group in groups if group.takes(name)), None)


def _empty(linear: nn.Linear, weight_format: WeightFormat) -> nn.Module:
    if weight_format.group:
        return PackedLinear.empty(linear, weight_format.bits, weight_format.group)
    weight = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(linear.out_features, 1, dtype=torch.bfloat16, device="meta")
    return Int8Linear(weight, scale, linear.bias, weight_format.activation_bits)
