"""How much of a draft's acceptance hangs on each search unit: three figures from gradients, and one that is measured.

Gradients are of the draft's log-probability of what the target wrote. Their squares, answer by answer, are the Fisher
information where the draft's law is near the target's.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.choice import swapped_weights
from foredraft.compress.parts import GateFisher
from foredraft.compress.probe import Bench, Probe
from foredraft.compress.quantize import Rounder, round_to_nearest
from foredraft.compress.rounding import product
from foredraft.core.errors import UserError
from foredraft.core.memory import is_out_of_memory
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.core.protocols import Answer
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.layers import layer_stack
from foredraft.models.units import EMBEDDING, Unit, search_units

_log = logging.getLogger(__name__)

Ranker = Literal["fisher", "grad_over_weight", "first_order"]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Figures of one unit; larger is more sensitive, and only figures of one kind compare.

    Attributes:
        grad_over_weight: ||gradient|| / ||weight||, Frobenius norms over the unit. Changes when two linked matrices are
            rescaled, though the function does not.
        fisher: Sum of squared gradients, text by text, * squared rounding errors: twice the expected loss of
            log-probability to second order.
        first_order: |sum of gradient * rounding error|.
        measured: mean_tokens_per_call that rounding the unit alone costs; NaN where it was not probed.
    """

    unit: str
    grad_over_weight: float
    fisher: float
    first_order: float
    measured: float = math.nan

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "measured": None if math.isnan(self.measured) else self.measured}


def sensitivities(
    draft: Draft,
    answers: Sequence[Answer],
    weight_format: WeightFormat,
    rounder: Rounder = round_to_nearest,
    progress: Progress = SILENT,
    gates: GateFisher | None = None,
) -> list[Sensitivity]:
    """Return the figures of every unit but the embedding, which is not rounded, from one backward pass over answers.

    The gradient of a head that is tied counts what comes through the head and through the embedding.

    Args:
        draft: Not quantized; float32. Left as it was.
        answers: Of the target, none of them empty.
        weight_format: What units are rounded to, for the figures that know it.
        gates: Sums what it needs from the same gradients.

    Raises:
        UserError: there are no answers, or a unit that no answer reaches.
    """
    if not answers:
        raise UserError("Sensitivity is measured on answers of the target, and none was given: collect a trace.")
    units = [unit for unit in search_units(draft.model) if unit.name != EMBEDDING]
    try:
        return _measured(draft, answers, units, weight_format, rounder, progress, gates)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    _log.warning("The gradients of all layers do not fit into memory: they are taken layer by layer, a pass for each.")
    if gates is not None:
        gates.start_over()
    layers = sorted({unit.layer for unit in units})
    parts = [[unit for unit in units if unit.layer == layer] for layer in layers]
    found = {
        one.unit: one
        for part in parts
        for one in _measured(draft, answers, part, weight_format, rounder, progress, gates)
    }
    return [found[unit.name] for unit in units]


def probed(
    draft: Draft,
    bench: Bench,
    found: Sequence[Sensitivity],
    weight_format: WeightFormat,
    most: int,
    k: int,
    by: Ranker = "fisher",
    rounder: Rounder = round_to_nearest,
    progress: Progress = SILENT,
) -> tuple[list[Sensitivity], float]:
    """Return the same with the loss measured for the `most` units that rank highest, and the passes that it took.

    Each probe rounds one unit in place, runs the layers from it on over the bench, and takes the rounding back.
    """
    shortlist = {one.unit for one in sorted(found, key=lambda one: getattr(one, by), reverse=True)[:most]}
    probe = Probe(draft, bench)
    units = {unit.name: unit for unit in search_units(draft.model)}
    losses = {
        name: probe.baseline.mean_tokens_per_call(k)
        - probe_rounded(draft, probe, units[name], weight_format, rounder).mean_tokens_per_call(k)
        for name in tracked(progress, "probing", sorted(shortlist), "units")
    }
    return [
        Sensitivity(one.unit, one.grad_over_weight, one.fisher, one.first_order, losses.get(one.unit, math.nan))
        for one in found
    ], probe.passes


@torch.no_grad()
def probe_rounded(
    draft: Draft, probe: Probe, unit: Unit, weight_format: WeightFormat, rounder: Rounder = round_to_nearest
) -> AcceptanceReport:
    """Return the report of the draft with one unit rounded; the draft is left as it was."""
    weights = {module: draft.model.get_submodule(module).weight.detach() for module in unit.modules}
    rounded = {module: product(*rounder(module, weight, weight_format)) for module, weight in weights.items()}
    with swapped_weights(draft.model, rounded):
        return probe.report_from(unit.layer if unit.layer >= 0 else len(layer_stack(draft.model)))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation, in [-1, 1]; 0 where either does not vary."""
    if len(one) < 2:
        return 0.0
    ranks = torch.stack([_ranks(values) for values in (one, other)])
    centred = ranks - ranks.mean(1, keepdim=True)
    size = centred.square().sum(1).prod().sqrt()
    return float((centred[0] * centred[1]).sum() / size) if size else 0.0


def _ranks(values: Sequence[float]) -> Float[Tensor, " values"]:
    """Return ranks from 0; equal values share the mean of theirs."""
    given = torch.tensor(values, dtype=torch.float64)
    below = (given[:, None] > given[None, :]).sum(1)
    equal = (given[:, None] == given[None, :]).sum(1)
    return below + (equal - 1) / 2


def _measured(
    draft: Draft,
    answers: Sequence[Answer],
    units: Sequence[Unit],
    weight_format: WeightFormat,
    rounder: Rounder,
    progress: Progress,
    gates: GateFisher | None,
) -> list[Sensitivity]:
    """Return the figures of some units from one backward pass over answers."""
    model = draft.model
    weights = {module: model.get_submodule(module).weight for unit in units for module in unit.modules}
    errors = {
        module: product(*rounder(module, weight.detach(), weight_format)) - weight.detach()
        for module, weight in weights.items()
    }
    sums = {module: torch.zeros_like(weight) for module, weight in weights.items()}
    fisher = dict.fromkeys(weights, 0.0)
    wanted = {id(weight) for weight in weights.values()}
    learning = {weight: weight.requires_grad for weight in model.parameters()}
    for weight in learning:
        weight.requires_grad_(id(weight) in wanted)
    try:
        for answer in tracked(progress, "taking gradients", answers, "answers"):
            _backward(model, answer, draft.head_token_ids)
            for module, weight in weights.items():
                gradient = weight.grad
                if gradient is None:
                    raise UserError(f"{module} has no gradient: the draft does not use it.")
                sums[module] += gradient
                fisher[module] += float((gradient * errors[module]).square().sum())
            if gates is not None:
                gates.add(weights)
            model.zero_grad(set_to_none=True)
    finally:
        model.zero_grad(set_to_none=True)
        for weight, learns in learning.items():
            weight.requires_grad_(learns)
    return [_figures(unit, weights, sums, errors, fisher) for unit in units]


def _backward(model: PreTrainedModel, answer: Answer, kept: Int[Tensor, " kept"]) -> None:
    """Leave the gradient of the log-probability of an answer in the weights; of a trimmed head, of what it can say."""
    token_ids = answer.token_ids.to(model.device)
    hidden = model.base_model(token_ids[None, :-1], use_cache=False).last_hidden_state[0, answer.start - 1 :]
    logits, emitted = model.get_output_embeddings()(hidden).float(), token_ids[answer.start :]
    if len(kept):
        kept = kept.to(model.device)
        said = torch.isin(emitted, kept)
        logits, emitted = logits[said][:, kept], torch.searchsorted(kept, emitted[said])
    logits.log_softmax(-1).gather(-1, emitted[:, None]).sum().backward()


def _figures(
    unit: Unit,
    weights: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    errors: Mapping[str, Tensor],
    fisher: Mapping[str, float],
) -> Sensitivity:
    modules = unit.modules
    gradient = math.sqrt(sum(float(sums[module].square().sum()) for module in modules))
    weight = math.sqrt(sum(float(weights[module].detach().square().sum()) for module in modules))
    first_order = abs(sum(float((sums[module] * errors[module]).sum()) for module in modules))
    return Sensitivity(unit.name, gradient / weight, sum(fisher[module] for module in modules), first_order)
