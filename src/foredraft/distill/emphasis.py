"""What each token of an answer weighs in training: by its place, by the target, by what it is worth; or not at all.

Weights average 1 over each answer. They depend on nothing but the answer, so it does not matter with which others it
is packed, nor in which process. The loss of a step stays a mean over its positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, UserError
from foredraft.core.lengths import LONGEST_DRAFT
from foredraft.core.options import read_options
from foredraft.distill.losses import Laws, Loss, LossGradient, loss_values
from foredraft.distill.packed import run_body
from foredraft.distill.packing import Pack
from foredraft.models.draft import Draft, load_draft
from foredraft.models.head import kept_rows
from foredraft.steps import DistillStep

# What the tokens of one answer weigh, up to a factor, by the target's largest probability (empty where it is not known)
# and by P(accept) at each.
PositionWeights = Callable[[Float[Tensor, " _"], Float[Tensor, " answer"]], Float[Tensor, " answer"]]


def uniform(confidence: Float[Tensor, " _"], acceptance: Float[Tensor, " answer"]) -> Float[Tensor, " answer"]:
    """Return 1 for each token: what a draft is scored by, the whole answer alike."""
    return torch.ones_like(acceptance)


def decay(
    confidence: Float[Tensor, " _"], acceptance: Float[Tensor, " answer"], rate: float = 0.99
) -> Float[Tensor, " answer"]:
    """Return rate^i for the token at distance i from the answer's start.

    For a draft that will serve short answers. The weights 0.8^(i-1) of multi-token heads are over the place in a
    *block*; an autoregressive draft taught on given text has no blocks: see `reach`.
    """
    return rate ** torch.arange(len(acceptance), device=acceptance.device, dtype=acceptance.dtype)


def confidence(
    confidence: Float[Tensor, " _"], acceptance: Float[Tensor, " answer"], power: float = 1.0
) -> Float[Tensor, " answer"]:
    """Return the target's largest probability to a power: where it hesitates, little can be accepted."""
    if len(confidence) != len(acceptance):
        raise UserError("position_weights: confidence is not known here; use decay or reach.")
    return confidence**power


def reach(
    confidence: Float[Tensor, " _"], acceptance: Float[Tensor, " answer"], k: int = 4
) -> Float[Tensor, " answer"]:
    """Return how many target calls one more unit of P(accept) saves at each token, when blocks of k are drafted.

    With s_t the probability that a block starts at t, a block reaches token t at offset n with probability
    s_{t-n} a_{t-n} .. a_{t-1}; accepting it there saves the difference between a fresh block behind it and the rest of
    this one. The weight is the sum over n < k: minus the derivative of sum_t s_t, the target calls, by a_t. 0 for the
    last token.

    Source: the replay recursion of Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; a_t is sum min(target,
    draft) of the draft as it is, held constant.
    """
    accepted = acceptance.tolist()
    saved = _calls_saved(accepted, k)
    return torch.tensor(saved, device=acceptance.device, dtype=acceptance.dtype)


def read_position_weights(spec: str) -> PositionWeights:
    """Return the weights that `decay:rate=0.99`, `confidence:power=1` or `reach:k=4` stand for; empty is uniform.

    Raises:
        UserError: no such weights, or not such an option.
    """
    name = spec.partition(":")[0]
    if name not in _WEIGHTS:
        raise UserError(f"Unknown position_weights {name!r}. Known: {', '.join(filter(None, _WEIGHTS))}.")
    takes = list(signature(_WEIGHTS[name]).parameters.values())[2:]
    options = read_options(spec, {option.name: type(option.default) for option in takes})
    for option, value in options.items():
        least, most = _RANGES[option]
        if not least <= value <= most:
            raise UserError(f"{spec}: {option} must lie between {least:g} and {most:g}.")
    return partial(_WEIGHTS[name], **options) if options else _WEIGHTS[name]


@final
class Reference:
    """A frozen draft whose losses say how hard a token is."""

    def __init__(self, model: PreTrainedModel, head: Float[Tensor, "rows hidden"]) -> None:
        self._model = model
        self._head = head

    @staticmethod
    def of(reference: Draft, draft: Draft) -> "Reference":
        """Return the reference for a draft.

        Raises:
            ModelError: the two do not compute the same rows of the head.
        """
        if not torch.equal(reference.head_token_ids, draft.head_token_ids) or (
            reference.model.config.vocab_size != draft.model.config.vocab_size
        ):
            raise ModelError(
                "The reference draft of selective tokens computes other rows of the head than the draft that is "
                "trained. Name one made with the same vocab, or leave reference out."
            )
        head = reference.model.get_output_embeddings().weight.detach()
        return Reference(reference.model, kept_rows(head, draft.head_token_ids))

    @torch.no_grad()
    def losses(self, pack: Pack, laws: Laws, loss: Loss) -> Float[Tensor, " positions"]:
        """Return its own losses under the laws of a pack, where that is read."""
        hidden = run_body(self._model, pack).last_hidden_state[0, pack.read] / pack.temperatures[:, None]
        return loss_values(hidden, self._head, laws, loss)


@dataclass(frozen=True, slots=True)
class Emphasis:
    """Position weights, and which tokens are kept.

    Attributes:
        weights: Of the tokens of an answer.
        share: Of each answer's tokens that is kept: those whose loss is farthest above the reference's.
        reference: What losses are compared with; None where all are kept.
    """

    weights: PositionWeights
    share: float = 1.0
    reference: Reference | None = None

    @staticmethod
    def of(settings: DistillStep, draft: Draft) -> "Emphasis | None":
        """Return what the settings ask for; None where all tokens weigh the same.

        Selection by the gap to a reference draft is AdaSPEC's (Hu et al. 2025, arXiv 2510.19779), who distil the
        reference first. Here the gap is of the loss of the step, ranked within each answer; without a checkpoint
        the reference is `draft` before its training, and what is kept are the tokens that were learnt least.

        Raises:
            UserError: such weights are not known.
            ModelError: the reference cannot be read, or has another head.
        """
        if not settings.position_weights and settings.selective.share == 1.0:
            return None
        weights = read_position_weights(settings.position_weights)
        if settings.selective.share == 1.0:
            return Emphasis(weights)
        name = settings.selective.reference
        other = load_draft(Path(name), "float32") if name else draft
        return Emphasis(weights, settings.selective.share, Reference.of(other, draft))

    def reference_losses(self, pack: Pack, laws: Laws, loss: Loss) -> Float[Tensor, " _"]:
        """Return the reference's losses under the laws of a pack, where that is read; empty without one."""
        return torch.empty(0) if self.reference is None else self.reference.losses(pack, laws, loss)

    def weigh(
        self, result: LossGradient, lengths: Sequence[int], reference_losses: Float[Tensor, " _"]
    ) -> LossGradient:
        """Return losses and gradient times the weights; acceptance stays.

        Args:
            result: Of the draft in training.
            lengths: Positions of each answer, in order.
            reference_losses: Of the same positions under the same loss; empty where all are kept.
        """
        sizes = list(lengths)
        accepted = result.acceptance.split(sizes)
        sure = result.confidence.split(sizes) if len(result.confidence) else [result.confidence] * len(sizes)
        parts = [self.weights(*answer) for answer in zip(sure, accepted, strict=True)]
        if len(reference_losses):
            gaps = (result.losses - reference_losses).split(sizes)
            parts = [part * _largest(gap, self.share) for part, gap in zip(parts, gaps, strict=True)]
        return result.scaled(torch.cat([_averaging_one(part) for part in parts]))


def _largest(gaps: Float[Tensor, " answer"], share: float) -> Float[Tensor, " answer"]:
    kept = gaps.topk(math.ceil(share * len(gaps))).indices
    return torch.zeros_like(gaps).scatter_(0, kept, 1.0)


def _averaging_one(weights: Float[Tensor, " answer"]) -> Float[Tensor, " answer"]:
    mean = weights.mean()
    return weights / mean if mean > 0.0 else torch.ones_like(weights)


def _calls_saved(accepted: Sequence[float], k: int) -> list[float]:
    length = len(accepted)
    # rest[t][n]: calls still to come when token t is next, at offset n of a block; fresh[t]: when a block starts there.
    rest = [[0.0] * (k + 1) for _ in range(length + 1)]
    fresh = [0.0] * (length + 1)
    for t in reversed(range(length)):
        rest[t][k] = fresh[t + 1]
        for n in range(k):
            rest[t][n] = accepted[t] * rest[t + 1][n + 1] + (1.0 - accepted[t]) * fresh[t + 1]
        fresh[t] = 1.0 + rest[t][0]
    saved = []
    here = [1.0] + [0.0] * k
    for t in range(length):
        saved.append(sum(here[n] * (fresh[t + 1] - rest[t + 1][n + 1]) for n in range(k)))
        starts = here[k] + (1.0 - accepted[t]) * sum(here[:k])
        here = [starts] + [accepted[t] * reached for reached in here[:k]]
    return saved


_WEIGHTS: dict[str, PositionWeights] = {"": uniform, "decay": decay, "confidence": confidence, "reach": reach}
_RANGES = {"rate": (0.0, 1.0), "power": (0.0, 100.0), "k": (1.0, LONGEST_DRAFT)}
