"""The law that tokens are drawn from: a model's logits after temperature, top-k and top-p.

Shapes: B.. any leading dimensions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from foredraft.core.errors import UserError

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """How logits become a law. Temperature 0 is the one-hot law of the largest logit.

    Attributes:
        temperature: Divides the logits; >= 0.
        top_k: Keep the k largest logits; 0 keeps all.
        top_p: Keep the smallest set of tokens whose mass reaches top_p; in (0, 1], 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more and finite, not {self.temperature}.")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_cut(self) -> bool:
        """Whether it gives tokens the probability 0 that the model does not."""
        return self.is_greedy or self.top_k > 0 or self.top_p < 1.0

    @property
    def stored(self) -> "SamplingLaw":
        """The law whose probabilities are kept of text drawn from this one: itself, or the plain law if greedy."""
        return SamplingLaw() if self.is_greedy else self

    @property
    def is_plain(self) -> bool:
        """Whether the law is the softmax of the raw logits."""
        return self == SamplingLaw()

    def __str__(self) -> str:
        parts = [f"T={self.temperature:g}"]
        if self.top_k and not self.is_greedy:
            parts.append(f"top-k={self.top_k}")
        if self.top_p < 1.0 and not self.is_greedy:
            parts.append(f"top-p={self.top_p:g}")
        return " ".join(parts)


GREEDY = SamplingLaw(temperature=0.0)


def law_logprobs(logits: Float[Tensor, "*batch vocab"], law: SamplingLaw) -> Float[Tensor, "*batch vocab"]:
    """Return the log-probabilities of the processed law, in float32; removed tokens are -inf.

    The order is that of transformers: temperature, then top-k, then top-p. Greedy is one-hot on
    the first largest logit.
    """
    logits = logits.float()
    if law.is_greedy:
        hot = torch.full_like(logits, float("-inf"))
        return hot.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / law.temperature
    if 0 < law.top_k < logits.shape[-1]:
        kth = logits.topk(law.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if law.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= law.top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits.log_softmax(-1)


def law_probs(logits: Float[Tensor, "*batch vocab"], law: SamplingLaw) -> Float[Tensor, "*batch vocab"]:
    """Return the probabilities of the processed law, in float32."""
    if law.is_greedy:
        hot = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return hot.scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return law_logprobs(logits, law).exp()


def token_logprobs(
    logits: Float[Tensor, "positions vocab"], token_ids: Int[Tensor, " positions"], law: SamplingLaw
) -> Float[Tensor, " positions"]:
    """Return log law(token) at each position. Holds no second [positions, vocab] for plain laws."""
    if law.is_greedy:
        hit = logits.argmax(-1) == token_ids
        return torch.where(hit, 0.0, float("-inf"))
    if law.top_k == 0 and law.top_p == 1.0:
        scaled = logits.float() / law.temperature
        return scaled.gather(-1, token_ids[:, None]).squeeze(-1) - scaled.logsumexp(-1)
    return law_logprobs(logits, law).gather(-1, token_ids[:, None]).squeeze(-1)


def sample_index(probs: Float[Tensor, " vocab"], uniform: float) -> int:
    """Return the token whose cumulative interval holds `uniform`, in [0, 1). Inverse-CDF sampling.

    Never returns a token of probability zero.
    """
    return int(sample_indices(probs[None], torch.tensor([uniform], dtype=torch.float64))[0])


def sample_indices(probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return `sample_index` of each row, with one uniform in [0, 1) each.

    Chooses a block of tokens first and a token of it then, so that only sums are accumulated.
    """
    padding = -probs.shape[-1] % _BLOCK
    blocks = (functional.pad(probs, (0, padding)) if padding else probs).unflatten(-1, (-1, _BLOCK))
    cumulative = blocks.sum(-1).double().cumsum(-1)
    thresholds = uniforms.to(cumulative) * cumulative[:, -1]
    block = _interval_of(cumulative, thresholds)
    rows = torch.arange(len(block), device=block.device)
    before = functional.pad(cumulative, (1, 0))[rows, block]
    return block * _BLOCK + _interval_of(blocks[rows, block].double().cumsum(-1), thresholds - before)


def _interval_of(cumulative: Float[Tensor, "rows parts"], thresholds: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return the first part whose cumulative mass is above the threshold; it has mass of its own."""
    total = cumulative[:, -1]
    # Rounding may put a threshold on the total itself, which no part is above.
    thresholds = thresholds.minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, thresholds[:, None], right=True).squeeze(-1)
