"""Distances between two laws from information theory, position by position, in nats.

`m` is the target's mass that the draft can say: 1 for a full head, less for a trimmed one.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.distill.losses.law import EventLaw


def forward_kl(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], temperature: float = 1.0
) -> Float[Tensor, " positions"]:
    """Return KL(target || draft), both laws softened, times the temperature squared.

    In [0, inf), 0 only for equal laws; at least m ln m where the draft can say only the mass m of the target.
    The square keeps the gradient's size; as the temperature grows the value tends to half the
    squared distance of the two logit vectors, each centred, over the number of events.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; the tail is softened as one event.
    """
    target, draft_logprobs = _softened(law.probs, draft_logprobs, temperature)
    return temperature**2 * (torch.xlogy(target, target) - target * draft_logprobs).sum(-1)


def soft_cross_entropy(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], temperature: float = 1.0
) -> Float[Tensor, " positions"]:
    """Return the cross-entropy of the draft under the target, both softened, times the temperature squared.

    That is forward_kl plus the target's own entropy: the same gradient, and a value that says how hard
    the text is. In [T^2 entropy of the softened target, inf), the lower end only for equal laws; as the temperature T
    grows it tends to T^2 times the logarithm of the number of events.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; the tail is softened as one event.
    """
    target, draft_logprobs = _softened(law.probs, draft_logprobs, temperature)
    return -(temperature**2) * (target * draft_logprobs).sum(-1)


def reverse_kl(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], floor: float = 1e-8
) -> Float[Tensor, " positions"]:
    """Return KL(draft || target), where the target gives no event less than `floor`.

    In [-events * floor / e, -ln floor], 0 for equal laws without events below the floor; at least ln 1/m. Without a
    floor it is infinite as soon as the draft says what a cut law (top-k, top-p) or a rounded one gives 0. Target
    mass that the draft cannot say is not seen. An event that the draft cannot say adds 0.

    Source: Gu et al. 2023 (MiniLLM, arXiv 2306.08543), section 2.1, exact and not by sampling; the floor is ours.
    """
    if not 0.0 < floor < 1.0:
        raise UserError(f"reverse_kl: floor must lie between 0 and 1, not {floor:g}.")
    return (draft_logprobs.exp() * (draft_logprobs - law.probs.clamp(min=floor).log())).sum(-1)


def jsd(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], beta: float = 0.5
) -> Float[Tensor, " positions"]:
    """Return beta KL(target || mix) + (1 - beta) KL(draft || mix), with mix = beta target + (1 - beta) draft.

    In [0, H(beta)], where H(beta) = -beta ln beta - (1 - beta) ln(1 - beta) is reached by laws that share no event
    (ln 2 for beta .5); 0 only for equal laws. Mass that the draft cannot say is an event of the target's alone. Divided
    by beta it tends to forward KL as beta falls to 0, divided by 1 - beta to reverse KL as beta rises to 1; for 0 and 1
    themselves those limits are returned, which have no such bound.

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), equation 1; the mixture is arithmetic.
    """
    if not 0.0 <= beta <= 1.0:
        raise UserError(f"jsd: beta must lie in [0, 1], not {beta:g}.")
    if beta == 0.0:
        return forward_kl(law, draft_logprobs)
    if beta == 1.0:
        return reverse_kl(law, draft_logprobs)
    target, draft = law.probs, draft_logprobs.exp()
    mix = (beta * target + (1.0 - beta) * draft).clamp(min=torch.finfo(draft.dtype).tiny).log()
    unsaid = (1.0 - target.sum(-1)).clamp(min=0.0) * -math.log(beta)
    of_target = (torch.xlogy(target, target) - target * mix).sum(-1) + unsaid
    of_draft = (draft * (draft_logprobs - mix)).sum(-1)
    return beta * of_target + (1.0 - beta) * of_draft


def hard_cross_entropy(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return -log draft(x) of the token x that the target emitted; in [0, inf).

    0, without a gradient, where the draft cannot say x. Its mean over what the target may emit is soft_cross_entropy.
    """
    chosen = law.emitted[:, None]
    sayable = law.probs.gather(1, chosen) > 0
    return -draft_logprobs.gather(1, chosen).where(sayable, 0.0).squeeze(1)


def _softened(
    target: Float[Tensor, "positions events"], draft_logprobs: Float[Tensor, "positions events"], temperature: float
) -> tuple[Float[Tensor, "positions events"], Float[Tensor, "positions events"]]:
    if temperature == 1.0:
        return target, draft_logprobs
    if not temperature > 0.0:
        raise UserError(f"The temperature that softens laws must be above 0, not {temperature:g}.")
    mass = target.sum(-1, keepdim=True)
    softened = target.pow(1.0 / temperature)
    softened = mass * softened / softened.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    return softened, (draft_logprobs / temperature).log_softmax(-1)
