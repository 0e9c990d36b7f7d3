"""Losses that are made of P(accept), the probability that the draft's token is accepted, position by position."""

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.distill.losses.divergences import forward_kl
from foredraft.distill.losses.law import EventLaw


def acceptance(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return sum min(target, draft) over events: an upper bound of P(accept), exact without a tail."""
    return torch.minimum(law.probs, draft_logprobs.exp()).sum(-1)


def total_variation(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return 1 - sum min(target, draft): the probability that the draft's token is rejected.

    In [0, 1], 0 only for equal laws.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6; as a loss Zhou et al. 2023
    (DistillSpec, arXiv 2310.08461).
    """
    return 1.0 - acceptance(law, draft_logprobs)


def tvd_plus_plus(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return the total variation, with the gradient of a policy whose rewards are normalised.

    In [0, 1], 0 only for equal laws. A draft token earns the reward 1 where target > draft, else 0; the gradient of
    the total variation is minus the expected reward's. Here each position's reward is centred and divided by its
    standard deviation sqrt(r (1 - r)) under the draft's own law, r being the draft's mass that earns it. Centring
    leaves an exact expectation as it is, so the gradient is the total variation's over that deviation: by logits it
    sums to at most 1 in absolute value, and fades with sqrt(r) where the total variation's fades with r. A deviation
    is at least the square root of the floating point's precision, so that rounding is not blown up.

    Source: Goel et al. 2024 (arXiv 2403.00858), section 3, who normalise over the tokens sampled in a batch; over the
    draft's law of one position nothing depends on what else is in the batch.
    """
    with torch.no_grad():
        value, draft = total_variation(law, draft_logprobs), draft_logprobs.exp()
        rewards = (law.probs > draft).to(draft.dtype)
        mean = (draft * rewards).sum(-1, keepdim=True)
        advantages = (rewards - mean) / (mean * (1.0 - mean)).clamp(min=torch.finfo(draft.dtype).eps).sqrt()
    pull = -(draft * advantages * draft_logprobs).sum(-1)
    return value + (pull - pull.detach())


def neg_log_acceptance(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return -log sum min(target, draft) in nats, in [0, -log of the smallest positive float].

    0 only for equal laws. The clamp at the upper end has no gradient.

    Source: Samarin et al. 2026 (arXiv 2602.23881).
    """
    overlap = acceptance(law, draft_logprobs)
    return -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()


def lk_hybrid(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], eta: float = 3.0
) -> Float[Tensor, " positions"]:
    """Return w KL(target || draft) + (1 - w) TV(target, draft), with w = exp(-eta acceptance) held constant.

    In [0, inf), 0 only for equal laws. Far from the target it is the KL, whose gradient does not
    fade there; close to it the rejection probability itself. The KL for eta 0, and nearly the total variation
    for a large eta.

    Source: Samarin et al. 2026 (arXiv 2602.23881); here the weight is each position's own.
    """
    if not eta >= 0.0:
        raise UserError(f"lk_hybrid: eta must be at least 0, not {eta:g}.")
    overlap = acceptance(law, draft_logprobs)
    weight = torch.exp(-eta * overlap.detach())
    return weight * forward_kl(law, draft_logprobs) + (1.0 - weight) * (1.0 - overlap)
