"""Linear layers that are fast for the few rows which a draft step and a target call have.

The libraries behind torch's `linear` on processors repack the whole weight before they multiply two rows or more,
which doubles the memory they touch; multiplied from the left, weight @ rows.T, the weight is read once. One row they
multiply on one core; taken twice, it is multiplied on all of them. The products are the same but for rounding.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor, float32, get_num_threads, nn
from torch.nn import functional

_MOST_ROWS = 9
_WIDE = 2  # outputs an input from which on one row is worth all cores


@final
class FewRowsLinear(nn.Linear):
    """An nn.Linear that multiplies up to 9 rows from the left."""

    def forward(self, input: Tensor) -> Tensor:
        return few_rows_linear(input, self.weight, self.bias)


def few_rows_linear(
    rows: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """Return rows @ weight.T + bias."""
    count = rows.numel() // rows.shape[-1]
    if not (1 <= count <= _MOST_ROWS and rows.device.type == "cpu" and rows.dtype == weight.dtype == float32):
        return functional.linear(rows, weight, bias)
    flat = rows.reshape(count, -1)
    if count == 1:
        if get_num_threads() == 1 or weight.shape[0] < _WIDE * weight.shape[1]:
            return functional.linear(rows, weight, bias)
        flat = flat.repeat(2, 1)
    product = (weight @ flat.T).T[:count].contiguous().view(*rows.shape[:-1], -1)
    return product if bias is None else product + bias


def speed_up_few_rows(model: nn.Module) -> None:
    """Make every plain nn.Linear of a model fast for few rows; weights stay what and where they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
