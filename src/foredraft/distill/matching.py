"""Matching: draw what happens inside a draft towards what happens inside the target, which runs live for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.attention_matching import AttentionMatching
from foredraft.distill.layer_matching import LayerMatching, projections
from foredraft.distill.packing import Pack
from foredraft.distill.seeing import Asked, Seen, look
from foredraft.steps import DistillStep


@runtime_checkable
class Term(Protocol):
    """One thing that is matched."""

    @property
    def asks_draft(self) -> Asked: ...

    @property
    def asks_target(self) -> Asked: ...

    def losses(self, here: Seen, there: Seen, pack: Pack) -> Float[Tensor, " positions"]:
        """Return how far the draft, `here`, is from the target, at each position that the pack is read at."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A term, its weight at the start, and the share of the steps in which that falls to 0."""

    term: Term
    weight: float
    until: float


@dataclass(frozen=True, slots=True)
class Matching:
    """Everything that is matched with one target.

    Attributes:
        target: Runs without a gradient.
        terms: With their weights.
        weights: What is trained for it beside the draft and thrown away, by name.
    """

    target: PreTrainedModel
    terms: tuple[Weighted, ...]
    weights: Mapping[str, nn.Parameter]

    @staticmethod
    def of(target: PreTrainedModel, draft: PreTrainedModel, settings: DistillStep) -> "Matching":
        """Return what the settings ask for; no terms where they ask for nothing.

        Raises:
            ModelError: a layer that one of the two does not have.
        """
        terms: list[Weighted] = []
        trained: dict[str, nn.Parameter] = {}
        if settings.layer_matching.weight:
            step = settings.layer_matching
            pairs = _pairs("layer_matching", step.layers or _spread(target, draft), target, draft)
            trained = projections(target, draft, pairs, settings.seed)
            terms.append(Weighted(LayerMatching(pairs, step.distance, trained), step.weight, step.until))
        if settings.attention_matching.weight:
            attention = settings.attention_matching
            last = {_depth(draft) - 1: _depth(target) - 1}
            pairs = _pairs("attention_matching", attention.layers or last, target, draft)
            terms.append(Weighted(AttentionMatching(pairs), attention.weight, attention.until))
        return Matching(target, tuple(terms), trained)

    def at(self, share: float) -> "Matching | None":
        """Return it as it is after that share of the steps, weights fallen linearly; None where nothing is left."""
        left = tuple(
            replace(part, weight=part.weight * (1.0 - share / part.until)) for part in self.terms if share < part.until
        )
        return replace(self, terms=left) if left else None

    @property
    def asks_draft(self) -> Asked:
        """What must be seen of the draft."""
        return _together(part.term.asks_draft for part in self.terms)

    def losses(self, here: Seen, pack: Pack) -> Float[Tensor, " positions"]:
        """Return the weighted sum of all terms where the pack is read."""
        with torch.no_grad():
            there = look(self.target, pack, _together(part.term.asks_target for part in self.terms))
        return torch.stack([part.weight * part.term.losses(here, there, pack) for part in self.terms]).sum(0)


def _together(asked: Iterable[Asked]) -> Asked:
    everything = list(asked)
    return Asked(any(one.states for one in everything), frozenset().union(*(one.attention for one in everything)))


def _depth(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _spread(target: PreTrainedModel, draft: PreTrainedModel) -> dict[int, int]:
    """Return the map that puts draft layer i of n, from 1, at i/n of the target's depth, rounded up."""
    deep, shallow = _depth(target), _depth(draft)
    return {layer: -(-(layer + 1) * deep // shallow) - 1 for layer in range(shallow)}


def _pairs(
    name: str, layers: Mapping[int, int], target: PreTrainedModel, draft: PreTrainedModel
) -> tuple[tuple[int, int], ...]:
    for model, numbers, who in ((draft, layers.keys(), "draft"), (target, layers.values(), "target")):
        outside = [number for number in numbers if not 0 <= number < _depth(model)]
        if outside:
            raise ModelError(
                f"{name}.layers: the {who} has layers 0 to {_depth(model) - 1}, not {', '.join(map(str, outside))}. "
                "Write draft layer: target layer."
            )
    return tuple(sorted(layers.items()))
