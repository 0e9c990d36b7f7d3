"""Rounding matrices to the nearest integers of a few bits, without calibration."""

import torch
from jaxtyping import BFloat16, Float, Int8
from torch import Tensor

_LARGEST = 127
_SMALLEST = torch.finfo(torch.float32).tiny


def round_rows(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], BFloat16[Tensor, "out 1"]]:
    """Return the nearest integers in [-127, 127] and the scale of each row, such that weight is near their product.

    A scale is a bfloat16 number, so that every runtime multiplies by the same one, whatever it computes
    in. No entry is off by more than half of it.
    """
    scale = (weight.abs().amax(-1, keepdim=True).double() / _LARGEST).clamp_min(_SMALLEST).bfloat16()
    return (weight.float() / scale.float()).round().to(torch.int8), scale


def group_scales(weight: Float[Tensor, "out in"], bits: int, group: int) -> BFloat16[Tensor, "out groups"]:
    """Return the scale of each group of inputs: its largest entry lies at most half a step beyond the largest integer.

    Rounded up to a bfloat16 number, so that it does.
    """
    largest = weight.float().reshape(len(weight), -1, group).abs().amax(-1)
    exact = (largest.double() / (2 ** (bits - 1) - 0.5)).clamp_min(_SMALLEST)
    nearest = exact.bfloat16()
    return torch.where(nearest < exact, nearest.nextafter(torch.full_like(nearest, torch.inf)), nearest)


def to_integers(weight: Float[Tensor, "..."], scale: Float[Tensor, "..."], bits: int) -> Float[Tensor, "..."]:
    """Return weight / scale as the nearest integers in [-2^(bits-1), 2^(bits-1) - 1]."""
    return (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def round_groups(
    weight: Float[Tensor, "out in"], bits: int, group: int
) -> tuple[Int8[Tensor, "out in"], BFloat16[Tensor, "out groups"]]:
    """Return the nearest integers and the scale of each group; no entry is off by more than half of it."""
    scale = group_scales(weight, bits, group)
    wide = scale.float().repeat_interleave(group, dim=1)
    return to_integers(weight.float(), wide, bits).to(torch.int8), scale


def product(integers: Int8[Tensor, "out in"], scale: BFloat16[Tensor, "out groups"]) -> Float[Tensor, "out in"]:
    """Return what the integers stand for, in float32."""
    grouped = integers.view(len(integers), scale.shape[1], -1).float() * scale.float()[..., None]
    return grouped.view(integers.shape)
