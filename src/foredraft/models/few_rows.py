"""Linear layers that are fast for the few rows which a target checks at once.

The libraries behind torch's `linear` on processors repack the whole weight before they multiply two rows or more,
which doubles the memory they touch. Multiplied from the left, weight @ rows.T, the weight is read once, as for one
row. The products are the same but for rounding.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor, float32, nn
from torch.nn import functional

_MOST_ROWS = 9


@final
class FewRowsLinear(nn.Linear):
    """An nn.Linear that multiplies 2 to 9 rows from the left."""

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return few_rows_linear(input, self.weight, self.bias)


def few_rows_linear(
    rows: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """Return rows @ weight.T + bias."""
    count = rows.numel() // rows.shape[-1]
    if not (2 <= count <= _MOST_ROWS and rows.device.type == "cpu" and rows.dtype == weight.dtype == float32):
        return functional.linear(rows, weight, bias)
    product = (weight @ rows.reshape(count, -1).T).T.contiguous().view(*rows.shape[:-1], -1)
    return product if bias is None else product + bias


def speed_up_few_rows(model: nn.Module) -> None:
    """Make every plain nn.Linear of a model fast for few rows; weights stay what and where they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
