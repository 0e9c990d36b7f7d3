"""Closed-form healing: where layers were cut out, the layers left learn to say what those would have said."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.models.calibration import Batch, watch
from foredraft.models.layers import has_pre_norms_only, layer_stack

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_CHECK_EVERY = 4  # One text in four chooses the ridge and measures the repair.


@dataclass(frozen=True, slots=True)
class Repair:
    """What healing one layer did, measured on calibration text that the fit did not see.

    Errors are mean squared differences to the target's state / that state's mean square; 0 is a perfect repair.

    Attributes:
        layer: Of the draft, from 0; its `down_proj` was refitted.
        depth: Target layers behind which the state lies that it was fitted to.
        ridge: Of the candidates the one with the least error, in units of the mean feature variance.
    """

    layer: int
    depth: int
    ridge: float
    error_before: float
    error_after: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def heal_linear(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    layers: Sequence[int],
    batches: Sequence[Batch],
    every_layer: bool = False,
    channels: Int[Tensor, " kept"] | None = None,
) -> list[Repair]:
    """Refit, in place, the last matrix of each layer of `draft` from the first cut on.

    Least squares with a ridge towards the present weights: the state behind the layer becomes the nearest
    that its feed-forward features can make to the target's state where the next kept layer starts (or
    where its final norm does). Every position counts by its relative error, since a norm reads the state
    next, and so that positions with huge states do not rule. Layers are healed in order, each on what
    the layers healed before it give; those behind a cut so make up for what its repair left.

    Args:
        draft: Layers `layers` of the target, whose feed-forward part ends in `mlp.down_proj`.
        layers: In the order in which the draft runs them.
        batches: Calibration text; one text in four is held back where the ridge is chosen, and used by the last solve.
        every_layer: Whether layers before the first cut are refitted too, as after narrowing.
        channels: Channels of the target's state that the draft kept; None for all.

    Returns:
        One entry for each layer that was refitted.

    Source: Shopkhoev et al. 2025, ReplaceMe (arXiv 2505.02819), which fits a square matrix behind
    `down_proj`; here `down_proj` itself is fitted, a larger family that needs no inverse.
    """
    _require_plain_ends(draft)
    depths = [*layers[1:], len(layer_stack(target))]
    cuts = [here for here, (layer, depth) in enumerate(zip(layers, depths, strict=True)) if depth != layer + 1]
    first = 0 if every_layer else min(cuts, default=len(layers))
    wanted = list(enumerate(depths))[first:]
    states = _target_states(target, sorted({depth for _, depth in wanted}), batches, channels)
    return [_heal_layer(draft, here, depth, states[depth], batches) for here, depth in wanted]


def _require_plain_ends(model: PreTrainedModel) -> None:
    for layer in layer_stack(model):
        if not has_pre_norms_only(layer) or not isinstance(getattr(layer.mlp, "down_proj", None), nn.Linear):
            raise ModelError(
                f"Layers of {type(model).__name__} do not end in a matrix mlp.down_proj whose product is added as it "
                "is, as those of Llama and Qwen do: heal: linear cannot repair them, set heal: none."
            )


@dataclass(slots=True)
class _Sums:
    """A least-squares problem as sums over its positions, in float64: of products of features and residuals."""

    gram: Float[Tensor, "features features"]
    cross: Float[Tensor, "features outputs"]
    square: float = 0.0
    positions: int = 0

    @staticmethod
    def empty(features: int, outputs: int) -> "_Sums":
        return _Sums(
            torch.zeros(features, features, dtype=torch.float64), torch.zeros(features, outputs, dtype=torch.float64)
        )

    def add(self, features: Float[Tensor, "positions features"], residual: Float[Tensor, "positions outputs"]) -> None:
        self.gram += (features.T @ features).cpu()
        self.cross += (features.T @ residual).cpu()
        self.square += float(residual.square().sum())
        self.positions += len(features)

    def with_(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.gram + other.gram,
            self.cross + other.cross,
            self.square + other.square,
            self.positions + other.positions,
        )

    def error(self, change: Float[Tensor, "features outputs"]) -> float:
        """Return the sum of squares of residual - features @ change."""
        return float((change * (self.gram @ change - 2 * self.cross)).sum()) + self.square

    def mean(self, square: float) -> float:
        """Return a sum of squares by position and output; 0 where there is none."""
        return square / (max(self.positions, 1) * self.cross.shape[1])


def _target_states(
    target: PreTrainedModel, depths: Sequence[int], batches: Sequence[Batch], channels: Int[Tensor, " kept"] | None
) -> dict[int, list[Float[Tensor, "positions hidden"]]]:
    states: dict[int, list[Tensor]] = {depth: [] for depth in depths}

    def keep(depth: int) -> Any:
        def watcher(_: Tensor, output: Tensor) -> None:
            states[depth].append((output if channels is None else output[:, channels.to(output.device)]).float().cpu())

        return watcher

    stack = layer_stack(target)
    for batch in batches:
        watch(target, batch, {stack[depth - 1]: keep(depth) for depth in depths})
    return states


def _heal_layer(
    draft: PreTrainedModel, here: int, depth: int, wanted: Sequence[Tensor], batches: Sequence[Batch]
) -> Repair:
    layer = layer_stack(draft)[here]
    down: nn.Linear = layer.mlp.down_proj
    parts = [_Sums.empty(down.in_features, down.out_features) for _ in range(2)]
    seen: dict[str, Tensor] = {}
    texts = 0
    for batch, state in zip(batches, wanted, strict=True):
        watch(
            draft,
            batch,
            {
                down: lambda features, _: seen.update(features=features),
                layer: lambda _, output: seen.update(output=output),
            },
        )
        there = state.to(seen["output"])
        scale = there.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
        features, residual = seen["features"] * scale, (there - seen["output"]) * scale
        held_back = (texts + batch.texts.to(scale.device)) % _CHECK_EVERY == _CHECK_EVERY - 1
        parts[0].add(features[~held_back], residual[~held_back])
        parts[1].add(features[held_back], residual[held_back])
        texts += len(batch.token_ids)
    fit, check = parts
    ridge = _best_ridge(fit, check)
    error = check.mean(check.error(_solved(fit, ridge)))
    change = _solved(fit.with_(check), ridge)
    with torch.no_grad():
        down.weight.add_(change.T.to(down.weight))
    return Repair(here, depth, ridge, check.mean(check.square), error)


def _best_ridge(fit: _Sums, check: _Sums) -> float:
    """Return the ridge whose solution on `fit` has the least error on `check`, the largest where that is empty."""
    if not check.positions:
        return _RIDGES[-1]
    return min(_RIDGES, key=lambda ridge: check.error(_solved(fit, ridge)))


def _solved(sums: _Sums, ridge: float) -> Float[Tensor, "features outputs"]:
    size = ridge * sums.gram.diagonal().mean().clamp(min=1e-12)
    regular = sums.gram + size * torch.eye(len(sums.gram), dtype=torch.float64)
    return torch.cholesky_solve(sums.cross, torch.linalg.cholesky(regular))
