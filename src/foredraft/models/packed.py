"""Linear layers whose weights stay packed integers of a few bits, one scale a group of inputs.

Their state dict is the pack-quantized layout of compressed-tensors: what save_pretrained writes, stock transformers
reads. They are unpacked at every pass: small in memory, exact, and no faster than plain weights in this process.
"""

from typing import final

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from jaxtyping import BFloat16, Float, Int, Int8
from torch import Tensor, nn
from torch.nn import functional


@final
class PackedLinear(nn.Module):
    """x -> x W^T + bias with W = integer * scale of its group, multiplied in the dtype of x.

    Attributes:
        weight_packed: Integers of `bits` bits in words of 32, one row an output.
        weight_scale: One number for each output and group of inputs.
        weight_shape: Outputs and inputs.
        bias: As in nn.Linear; None without.
        bits: 4 or 8.
    """

    def __init__(
        self,
        weight_packed: Int[Tensor, "out words"],
        weight_scale: BFloat16[Tensor, "out groups"],
        weight_shape: Int[Tensor, "2"],
        bias: Float[Tensor, " out"] | None,
        bits: int,
        in_features: int,
    ) -> None:
        super().__init__()
        self.weight_packed = nn.Parameter(weight_packed, requires_grad=False)
        self.weight_scale = nn.Parameter(weight_scale, requires_grad=False)
        self.weight_shape = nn.Parameter(weight_shape, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.bits = bits
        self.out_features, self.in_features = weight_packed.shape[0], in_features

    @staticmethod
    def of(
        integers: Int8[Tensor, "out in"],
        scale: BFloat16[Tensor, "out groups"],
        bias: Float[Tensor, " out"] | None,
        bits: int,
    ) -> "PackedLinear":
        """Pack integers in [-2^(bits-1), 2^(bits-1) - 1]."""
        packed = pack_to_int32(integers, bits)
        return PackedLinear(packed, scale, torch.tensor(integers.shape), bias, bits, integers.shape[1])

    @staticmethod
    def empty(linear: nn.Linear, bits: int, group: int) -> "PackedLinear":
        """Return a layer without values, on the meta device, to load those of a file into."""
        out, inputs = linear.out_features, linear.in_features
        packed = torch.empty(out, -(-inputs * bits // 32), dtype=torch.int32, device="meta")
        scale = torch.empty(out, inputs // group, dtype=torch.bfloat16, device="meta")
        shape = torch.empty(2, dtype=torch.int64, device="meta")
        return PackedLinear(packed, scale, shape, linear.bias, bits, inputs)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return functional.linear(x, self.unpacked(x.dtype), self.bias)

    def unpacked(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """Return the weight; each product of integer and scale is rounded once, to `dtype`."""
        integers = self.integers()
        scale = self.weight_scale.to(dtype)
        grouped = integers.view(self.out_features, scale.shape[1], -1).to(dtype)
        return (grouped * scale[..., None]).view(self.out_features, self.in_features)

    def integers(self) -> Int8[Tensor, "out in"]:
        """Return the integers, one a weight."""
        return unpack_from_int32(self.weight_packed, self.bits, torch.Size((self.out_features, self.in_features)))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"
