"""Linear layers whose weights stay 8-bit integers, in memory as on disk.

Their state dict is the int-quantized layout of compressed-tensors: what save_pretrained writes, stock
transformers reads.
"""

import json
from pathlib import Path
from typing import Any, Literal, final

import torch
from accelerate import init_empty_weights
from jaxtyping import BFloat16, Float, Int8
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foredraft.core.errors import ModelError

ActivationBits = Literal[8, 16]

_KERNEL_ROWS = 8  # beyond, widening the weights to float32 costs less than the kernel does
_SMALLEST = torch.finfo(torch.float32).tiny


@final
class Int8Linear(nn.Module):
    """x -> x W^T + bias with W = weight * weight_scale, computed alike for one row and for many.

    Inputs are rounded first: to bfloat16, or (activation_bits 8) each row to 256 steps of its own size, as
    runtimes with integer products do. Products are summed in float32, the sum rounded to bfloat16.

    Attributes:
        weight: Integers, one row an output.
        weight_scale: What each row is multiplied by.
        bias: As in nn.Linear; None without.
        activation_bits: 16 or 8.
    """

    def __init__(
        self,
        weight: Int8[Tensor, "out in"],
        weight_scale: BFloat16[Tensor, "out 1"],
        bias: Float[Tensor, " out"] | None,
        activation_bits: ActivationBits,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(weight_scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.activation_bits = activation_bits
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        rows = x.reshape(-1, self.in_features).float()
        if self.activation_bits == 8:
            step = (rows.abs().amax(-1, keepdim=True) / 127.5).clamp_min(_SMALLEST)
            result = self._product((rows / step).round().clamp(-128, 127).bfloat16()).float() * step
        else:
            result = self._product(rows.bfloat16())
        if self.bias is not None:
            result = result + self.bias
        return result.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, activation_bits={self.activation_bits}"
        )

    def _product(self, rows: BFloat16[Tensor, "rows in"]) -> BFloat16[Tensor, "rows out"]:
        scale = self.weight_scale.flatten().bfloat16()
        if rows.device.type == "cpu" and len(rows) <= _KERNEL_ROWS:
            return torch.ops.aten._weight_int8pack_mm(rows, self.weight, scale)
        return (rows.float() @ self.weight.float().T * scale.float()).bfloat16()


def body_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name, its head left out."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def int8_plan(model: PreTrainedModel, activation_bits: ActivationBits) -> dict[str, Any]:
    """Return the quantization_config of a model whose body is of Int8Linear."""
    head = model.get_output_embeddings()
    return _plan([name for name, module in model.named_modules() if module is head], activation_bits)


def has_int8_body(path: Path) -> bool:
    """Whether a model folder holds what load_int8 reads."""
    return bool(_read_plan(path))


def load_int8(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of a folder for which has_int8_body holds; `dtype` is that of all but its body.

    Raises:
        ModelError: its weights are not those that its config.json asks for.
    """
    activation_bits: ActivationBits = 8 if "input_activations" in _read_plan(path)["config_groups"]["body"] else 16
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    for name, linear in body_linears(model).items():
        weight = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
        scale = torch.empty(linear.out_features, 1, dtype=torch.bfloat16, device="meta")
        model.set_submodule(name, Int8Linear(weight, scale, linear.bias, activation_bits))
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() and not name.endswith(".weight_scale") else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    _, unknown = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent or unknown:
        fault = f"lacks {absent[0]}" if absent else f"holds {unknown[0]}, which config.json does not ask for"
        raise ModelError(f"{path / 'model.safetensors'} {fault}. Quantize the draft again.")
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def _read_plan(path: Path) -> dict[str, Any]:
    """Return the quantization_config of a folder, empty if it is none that int8_plan makes."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    plan = config.get("quantization_config") or {}
    known = [_plan(plan.get("ignore"), 8), _plan(plan.get("ignore"), 16)]
    return plan if plan in known else {}


def _plan(ignore: Any, activation_bits: ActivationBits) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "format": "int-quantized",
    }
    if activation_bits == 8:
        group["input_activations"] = {**eight, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"body": group},
        "ignore": ignore,
    }
