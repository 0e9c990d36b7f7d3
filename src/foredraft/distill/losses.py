"""What training makes small: distances between the target's law and the draft's, position by position.

A position's law is spread over *events*: the target's most probable tokens, each an event of its own, and
one last event for all other tokens of the draft's head (the tail). A law known in full is the case where
every token is an event and the tail is empty. By the data-processing inequality no distance over events
exceeds the same distance over tokens; they are equal when the tail is empty.

Mass of the target on tokens that the draft cannot say (rows cut from its head) counts as rejected. It is
never renormalised away: such events have target probability 0 here, and the rest sums to less than 1.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.catalog import resolve

UNSAYABLE = -1
_ABSENT = -1e30
_LK_RATE = 3.0


@dataclass(frozen=True, slots=True)
class EventLaw:
    """The target's law at some positions, spread over the draft's events.

    Attributes:
        rows: Rows of the draft's head that are events of their own, or UNSAYABLE. No row twice.
        probs: Target probability of each event, the tail last.
        emitted: Event of the token that the target emitted.
    """

    rows: Int[Tensor, "positions top"]
    probs: Float[Tensor, "positions 1+top"]
    emitted: Int[Tensor, " positions"]

    @staticmethod
    def full(probs: Float[Tensor, "positions vocab"], emitted: Int[Tensor, " positions"]) -> "EventLaw":
        """Return the law in which every row of the head is an event and the tail is empty."""
        rows = torch.arange(probs.shape[1], device=probs.device).expand(probs.shape)
        return EventLaw(rows, torch.nn.functional.pad(probs, (0, 1)), emitted)

    def to(self, device: torch.device) -> "EventLaw":
        """Return the law on another device."""
        return EventLaw(self.rows.to(device), self.probs.to(device), self.emitted.to(device))

    def __len__(self) -> int:
        return len(self.emitted)

    def __getitem__(self, positions: slice) -> "EventLaw":
        return EventLaw(self.rows[positions], self.probs[positions], self.emitted[positions])


@runtime_checkable
class Laws(Protocol):
    """The target's law at many positions, made for some of them when asked; an EventLaw is one."""

    def __len__(self) -> int:
        """Number of positions."""

    def __getitem__(self, positions: slice) -> EventLaw:
        """Return the law at a run of positions; the same one each time."""

    def to(self, device: torch.device) -> "Laws":
        """Return the same laws, given out on another device."""


# A distance of the draft's law, given as log-probabilities of the same events, at each position.
Loss = Callable[[EventLaw, Float[Tensor, "positions events"]], Float[Tensor, " positions"]]


def forward_kl(
    law: EventLaw, draft_logprobs: Float[Tensor, "positions events"], temperature: float = 1.0
) -> Float[Tensor, " positions"]:
    """Return KL(target || draft) in nats, both laws softened, times the temperature squared.

    In [0, inf), 0 only for equal laws; at least m ln m where the draft can say only the mass m of the target.
    The square keeps the gradient's size; as the temperature grows the value tends to half the
    squared distance of the two logit vectors, each centred, over the number of events.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; the tail is softened as one event.
    """
    target = law.probs
    if temperature != 1.0:
        mass = target.sum(-1, keepdim=True)
        softened = target.pow(1.0 / temperature)
        target = mass * softened / softened.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
        draft_logprobs = (draft_logprobs / temperature).log_softmax(-1)
    return temperature**2 * (torch.xlogy(target, target) - target * draft_logprobs).sum(-1)


def hard_cross_entropy(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return -log draft(x) of the token x that the target emitted, in nats; in [0, inf).

    0, without a gradient, where the draft cannot say x.
    """
    chosen = law.emitted[:, None]
    sayable = law.probs.gather(1, chosen) > 0
    return -draft_logprobs.gather(1, chosen).where(sayable, 0.0).squeeze(1)


def total_variation(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return 1 - sum min(target, draft): the probability that the draft's token is rejected.

    In [0, 1], 0 only for equal laws.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6; as a loss Zhou et al. 2023
    (DistillSpec, arXiv 2310.08461).
    """
    return 1.0 - acceptance(law, draft_logprobs)


def neg_log_acceptance(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return -log sum min(target, draft) in nats, in [0, -log of the smallest positive float].

    0 only for equal laws. The clamp at the upper end has no gradient.

    Source: Samarin et al. 2026 (arXiv 2602.23881).
    """
    overlap = acceptance(law, draft_logprobs)
    return -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()


def lk_hybrid(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return w KL(target || draft) + (1 - w) TV(target, draft), with w = exp(-3 acceptance) held constant.

    In [0, inf), 0 only for equal laws. Far from the target it is the KL, whose gradient does not
    fade there; close to it the rejection probability itself.

    Source: Samarin et al. 2026 (arXiv 2602.23881); here the weight is each position's own.
    """
    overlap = acceptance(law, draft_logprobs)
    weight = torch.exp(-_LK_RATE * overlap.detach())
    return weight * forward_kl(law, draft_logprobs) + (1.0 - weight) * (1.0 - overlap)


def acceptance(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
    """Return sum min(target, draft) over events: an upper bound of P(accept), exact without a tail."""
    return torch.minimum(law.probs, draft_logprobs.exp()).sum(-1)


def weighted_loss(weights: Mapping[str, float], temperature: float) -> Loss:
    """Return the weighted sum of losses by their catalog names; those that take a temperature get it."""
    terms = [
        (
            weight,
            partial(resolve("losses", name), temperature=temperature)
            if takes_temperature(name)
            else resolve("losses", name),
        )
        for name, weight in weights.items()
    ]

    def total(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
        return torch.stack([weight * loss(law, draft_logprobs) for weight, loss in terms]).sum(0)

    return total


def takes_temperature(name: str) -> bool:
    """Return whether the catalog's loss `name` softens laws."""
    return "temperature" in inspect.signature(resolve("losses", name)).parameters


@dataclass(frozen=True, slots=True)
class LossGradient:
    """Losses of some positions, and what they ask of the hidden states.

    Attributes:
        losses: One for each position.
        acceptance: sum min(target, draft) over events.
        hidden: Gradient of the sum of the losses.
    """

    losses: Float[Tensor, " positions"]
    acceptance: Float[Tensor, " positions"]
    hidden: Float[Tensor, "positions hidden"]


def loss_gradient(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    law: Laws,
    loss: Loss,
    chunk: int = 256,
) -> LossGradient:
    """Return the losses of the law softmax(hidden head^T), and their gradient by `hidden`; `head` gets none.

    Holds [chunk, rows] once and nothing larger. The loss and its derivative are taken over events only;
    of the other rows just their common log-sum-exp matters, so their gradient is the tail's times
    their share of it.
    """
    parts = [
        _chunk_gradient(hidden[start : start + chunk], head, law[start : start + chunk], loss)
        for start in range(0, len(law), chunk)
    ]
    return LossGradient(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def _chunk_gradient(
    hidden: Float[Tensor, "positions hidden"], head: Float[Tensor, "rows hidden"], law: EventLaw, loss: Loss
) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"], Float[Tensor, "positions hidden"]]:
    logits = hidden @ head.T
    sayable = law.rows != UNSAYABLE
    cells = sayable.nonzero()[:, 0], law.rows[sayable]
    top = logits.new_full(law.rows.shape, _ABSENT).masked_scatter_(sayable, logits[cells])

    logits[cells] = float("-inf")
    largest = logits.amax(-1, keepdim=True).clamp(min=_ABSENT)
    tail_weights = logits.sub_(largest).exp_()
    tail_total = tail_weights.sum(-1, keepdim=True)
    tail = (largest + tail_total.log()).clamp(min=_ABSENT)

    events = torch.cat([top, tail], -1)
    law = replace(law, probs=law.probs.where(events > _ABSENT, 0.0))
    with torch.enable_grad():
        draft_logprobs = events.requires_grad_().log_softmax(-1)
        losses = loss(law, draft_logprobs)
        (gradient,) = torch.autograd.grad(losses.sum(), events)

    logits_gradient = tail_weights.mul_(gradient[:, -1:] / tail_total.clamp(min=torch.finfo(tail_total.dtype).tiny))
    logits_gradient[cells] = gradient[:, :-1][sayable]
    return losses.detach(), acceptance(law, draft_logprobs), logits_gradient @ head
