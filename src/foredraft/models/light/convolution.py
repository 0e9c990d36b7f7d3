"""Causal depthwise-separable convolution: each channel over the last few tokens, then all channels of one token."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


@final
class Convolution(nn.Module):
    """A layer's view of the past: the last `kernel` tokens, in order.

    Costs (kernel + hidden) * hidden multiplications a token where a whole convolution costs kernel * hidden**2.

    Source: Chollet 2017 (arXiv 1610.02357), in one dimension and looking back only.
    """

    def __init__(self, hidden: int, kernel: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(kernel, hidden))
        self.mix = nn.Linear(hidden, hidden, bias=False)

    def start(self, rows: int) -> Float[Tensor, "rows past hidden"]:
        """Return what stands for the tokens before the first one: zeros."""
        kernel, hidden = self.taps.shape
        return self.taps.new_zeros(rows, kernel - 1, hidden)

    def forward(
        self, x: Float[Tensor, "rows tokens hidden"], past: Float[Tensor, "rows past hidden"]
    ) -> tuple[Float[Tensor, "rows tokens hidden"], Float[Tensor, "rows past hidden"]]:
        """Return the mixed tokens, and what the next ones need to see of them."""
        seen = torch.cat([past, x], 1)
        tokens = x.shape[1]
        mixed = sum(seen[:, tap : tap + tokens] * weights for tap, weights in enumerate(self.taps))
        return self.mix(functional.silu(mixed)), seen[:, tokens:]
