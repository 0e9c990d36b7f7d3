"""Linear layers whose weights stay 8-bit integers, in memory as on disk.

Their state dict is the int-quantized layout of compressed-tensors: what save_pretrained writes, stock
transformers reads.
"""

from typing import Literal, final

import torch
from jaxtyping import BFloat16, Float, Int8
from torch import Tensor, nn
from transformers import PreTrainedModel

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
