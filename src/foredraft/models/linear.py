"""Plain linear layers made of weights that exist."""

from jaxtyping import Float
from torch import Tensor, nn


def linear_of(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> nn.Linear:
    """Return the linear layer of a weight and a bias, neither of which is copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear
