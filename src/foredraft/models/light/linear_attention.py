"""Linear attention: a sum over all tokens before, kept as one matrix a head, so that a step costs the same anywhere."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

_CHUNK = 64


class Sums(NamedTuple):
    """What has been read: sums over tokens of phi(key) value^T, and of phi(key), the normaliser."""

    products: Float[Tensor, "rows heads width width"]
    keys: Float[Tensor, "rows heads width"]


@final
class LinearAttention(nn.Module):
    """A layer's view of the past: every token, weighed by phi(query) . phi(key) over the sum of those weights.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 8 and 16 to 20, phi(u) = elu(u) + 1.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.project = nn.Linear(hidden, 3 * hidden, bias=False)
        self.mix = nn.Linear(hidden, hidden, bias=False)

    def start(self, rows: int) -> Sums:
        """Return the sums before the first token."""
        width = self.mix.in_features // self._heads
        zeros = self.mix.weight.new_zeros(rows, self._heads, width, width)
        return Sums(zeros, zeros[..., 0])

    def forward(
        self, x: Float[Tensor, "rows tokens hidden"], past: Sums
    ) -> tuple[Float[Tensor, "rows tokens hidden"], Sums]:
        """Return the mixed tokens, and the sums behind them; chunk by chunk, so that time grows with the tokens."""
        rows, tokens, hidden = x.shape
        split = self.project(x).view(rows, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = functional.elu(split[0]) + 1.0, functional.elu(split[1]) + 1.0, split[2]
        mixed = []
        for part in zip(queries.split(_CHUNK, 2), keys.split(_CHUNK, 2), values.split(_CHUNK, 2), strict=True):
            one, past = _chunk(*part, past)
            mixed.append(one)
        return self.mix(torch.cat(mixed, 2).transpose(1, 2).reshape(rows, tokens, hidden)), past


def _chunk(
    queries: Float[Tensor, "rows heads tokens width"],
    keys: Float[Tensor, "rows heads tokens width"],
    values: Float[Tensor, "rows heads tokens width"],
    past: Sums,
) -> tuple[Float[Tensor, "rows heads tokens width"], Sums]:
    weights = (queries @ keys.transpose(2, 3)).tril()
    numerators = weights @ values + queries @ past.products
    # phi > 0: a token weighs itself, so that the normaliser is never 0.
    normalisers = weights.sum(-1) + (queries @ past.keys[..., None])[..., 0]
    sums = Sums(past.products + keys.transpose(2, 3) @ values, past.keys + keys.sum(2))
    return numerators / normalisers[..., None], sums
