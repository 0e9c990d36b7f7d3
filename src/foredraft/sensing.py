"""What the verb `sensitivity` finds: how much of a draft's acceptance hangs on each of its parts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foredraft.compress.masks import masked, read_mask
from foredraft.compress.parts import GateFisher, Part, parts_of, probed_parts
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.quantize import require_plain
from foredraft.compress.sensitivity import Sensitivity, probed, rank_correlation, sensitivities
from foredraft.compressing import bench_of, sample_answers
from foredraft.core.errors import ModelError
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Speaker
from foredraft.lineage import manifest_for
from foredraft.models.calibration import calibration_batches
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft
from foredraft.models.units import search_units
from foredraft.shrink_steps import SensitivitySettings
from foredraft.trace.store import Trace

_RANKERS = ("fisher", "grad_over_weight", "first_order")


def draft_sensitivity(
    source: Path,
    target: Speaker,
    traces: Sequence[Trace],
    settings: SensitivitySettings,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Return how much hangs on each unit of a draft: figures by unit, their rank correlations, and what probes cost;
    how much hangs on groups of heads and channels; and what masks of single weights would cost.

    Raises:
        ModelError: the draft is quantized already, or asked for parts that it does not have.
        RecipeError: a group that does not divide the inputs of a matrix, or no mask.
        VocabMismatchError: the draft speaks other tokens.
        UserError: there is no trace.
    """
    draft = load_draft(source, "float32")
    manifest_for(source, target)
    require_plain(draft)
    masks = [(text, read_mask(text)) for text in settings.masks]
    sample = sample_answers(traces, target, settings.answers)
    chosen = WeightFormat(settings.bits, settings.group if settings.bits == 4 else 0)
    unit_formats(draft.model, search_units(draft.model), {"*": settings.bits}, settings.group)
    parts = parts_of(draft.model, settings.channels)
    if settings.parts and not parts:
        raise ModelError(
            f"parts: the layers of {type(draft.model).__name__} have no matrix that is known to read heads or "
            "channels: leave parts out."
        )
    gates, k = GateFisher(parts), settings.num_draft_tokens
    found, passes = sensitivities(draft, sample, chosen, progress=progress, gates=gates), 0.0
    bench = bench_of(traces, settings.answers, k)
    if settings.probes:
        found, passes = probed(draft, bench, found, chosen, settings.probes, k, settings.by, progress=progress)
    parts = gates.parts()
    if settings.parts:
        parts = probed_parts(draft, Probe(draft, bench), parts, settings.parts, k, progress)
    measured = [one for one in found if not math.isnan(one.measured)]
    batches = calibration_batches(sample) if masks else []
    return {
        "draft": str(source),
        "format": chosen.name,
        "answers": len(sample),
        "units": [one.to_json() for one in found],
        "rank_correlation": _correlations(measured),
        "probes": len(measured),
        "passes_per_probe": passes / max(len(measured), 1),
        "parts": [part.to_json() for part in parts],
        "parts_rank_correlation": _agreement(parts),
        "masks": {text: _tokens_per_call(masked(draft, mask, batches), bench, k) for text, mask in masks},
        "mean_tokens_per_call": _tokens_per_call(draft, bench, k) if masks else None,
    }


def _tokens_per_call(draft: Draft, bench: Bench, k: int) -> float:
    return measure(draft, bench).mean_tokens_per_call(k)


def _correlations(measured: Sequence[Sensitivity]) -> dict[str, float]:
    losses = [one.measured for one in measured]
    return {name: rank_correlation([getattr(one, name) for one in measured], losses) for name in _RANKERS}


def _agreement(parts: Sequence[Part]) -> float:
    cut = [(part.fisher, part.measured) for part in parts if part.measured is not None]
    return rank_correlation([fisher for fisher, _ in cut], [loss for _, loss in cut])
