"""Losses where the head learns too: plain automatic differentiation, chunk by chunk."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.distill.losses import UNSAYABLE, EventLaw, Laws, Loss, LossGradient, acceptance
from foredraft.distill.losses.law import ABSENT


def learned_head_losses(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    laws: Laws,
    loss: Loss,
    positions: float,
    chunk: int = 256,
) -> LossGradient:
    """Return what losses.loss_gradient returns; add the gradient of the sum of losses / `positions` to `head.grad`.

    Holds a few times [chunk, rows].
    """
    losses, accepted, gradients = [], [], []
    for start in range(0, len(laws), chunk):
        part = hidden[start : start + chunk].detach().requires_grad_()
        law = laws[start : start + chunk]
        draft_logprobs = _events(part @ head.T, law).log_softmax(-1)
        some = loss(law, draft_logprobs)
        gradient, of_head = torch.autograd.grad(some.sum(), (part, head))
        head.grad = of_head / positions if head.grad is None else head.grad.add_(of_head / positions)
        losses.append(some.detach())
        accepted.append(acceptance(law, draft_logprobs.detach()))
        gradients.append(gradient)
    return LossGradient(*map(torch.cat, (losses, accepted, gradients)))


def _events(logits: Float[Tensor, "some rows"], law: EventLaw) -> Float[Tensor, "some events"]:
    """Return the logits of a law's events: those of its rows, and the log-sum-exp of all others."""
    sayable = law.rows != UNSAYABLE
    rows = law.rows.clamp(min=0)
    top = logits.gather(1, rows).where(sayable, ABSENT)
    named = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, rows, sayable)
    tail = logits.masked_fill(named, ABSENT).logsumexp(-1, keepdim=True)
    return torch.cat([top, tail], -1)
