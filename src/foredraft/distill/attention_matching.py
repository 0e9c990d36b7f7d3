"""Attention matching: where a draft looks against where the target looks."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.distill.packing import Pack
from foredraft.distill.seeing import Asked, Attention, Seen


@dataclass(frozen=True, slots=True)
class AttentionMatching:
    """Pairs of layers whose attention is compared: draft layer and target layer, from 0."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def asks_draft(self) -> Asked:
        return Asked(attention=frozenset(layer for layer, _ in self.pairs))

    @property
    def asks_target(self) -> Asked:
        return Asked(attention=frozenset(other for _, other in self.pairs))

    def losses(self, here: Seen, there: Seen, pack: Pack) -> Float[Tensor, " positions"]:
        """Return KL(target's attention || draft's) in nats where the pack is read, averaged over pairs.

        In [0, inf), 0 only for equal attention. Head by head where both have as many, averaged over them; else the mean
        attention of all heads.

        Source: Wang et al. 2020 (MiniLM, arXiv 2002.10957), equation 6, there for the last layer alone and with the
        relation of values beside it; the mean over heads is ours.
        """
        pairs = [
            torch.cat(
                [_divergence(*group) for group in zip(here.attention[layer], there.attention[other], strict=True)]
            )
            for layer, other in self.pairs
        ]
        return torch.stack(pairs).mean(0)[pack.read]


def _divergence(here: Attention, there: Attention) -> Float[Tensor, " tokens"]:
    ours, theirs = here.logprobs, there.logprobs
    if len(ours) != len(theirs):
        ours, theirs = _mean_over_heads(ours), _mean_over_heads(theirs)
    return (theirs.exp() * (theirs - ours)).masked_fill(here.blocked, 0.0).sum(-1).mean(0)


def _mean_over_heads(logprobs: Float[Tensor, "heads tokens keys"]) -> Float[Tensor, "1 tokens keys"]:
    return torch.logsumexp(logprobs, 0, keepdim=True) - torch.tensor(float(len(logprobs))).log()
