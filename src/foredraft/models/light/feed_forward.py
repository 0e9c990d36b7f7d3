"""A gated feed-forward part of which only the few strongest channels of a token are active."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


@final
class FeedForward(nn.Module):
    """Down(silu(gate(x)) * up(x)), kept where it is largest.

    Attributes:
        active: Channels kept for each token, by magnitude; 0 keeps all. Behind the cut the others' rows of the last
            matrix are not read.

    Source: top-k activations as in Makhzani and Frey 2014 (arXiv 1312.5663), on the hidden channels of each token.
    """

    def __init__(self, hidden: int, channels: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.gate = nn.Linear(hidden, channels, bias=False)
        self.up = nn.Linear(hidden, channels, bias=False)
        self.down = nn.Parameter(torch.empty(channels, hidden))

    def forward(self, x: Float[Tensor, "rows tokens hidden"]) -> Float[Tensor, "rows tokens hidden"]:
        channels = functional.silu(self.gate(x)) * self.up(x)
        if not self.active:
            return channels @ self.down
        strongest = channels.abs().topk(self.active, -1).indices
        if x.shape[:2].numel() == 1:
            rows = strongest.flatten()
            return (channels.flatten()[rows] @ self.down[rows]).view_as(x)
        kept = torch.zeros_like(channels).scatter(-1, strongest, channels.gather(-1, strongest))
        return kept @ self.down
