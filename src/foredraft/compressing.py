"""What the verbs that shrink drafts make, from folders to folders."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch

from foredraft.checkpoint import DraftManifest
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.plan import unit_formats
from foredraft.compress.prune import prune_layers
from foredraft.compress.quantize import Rounder, quantize, require_plain, round_to_nearest, unit_sizes
from foredraft.compress.units import HEAD, search_units
from foredraft.core.errors import UserError
from foredraft.core.protocols import Answer, Speaker
from foredraft.lineage import extended, manifest_for
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.target import LocalTarget
from foredraft.steps import PruneStep, QuantizeStep
from foredraft.trace.store import Trace, require_same

_log = logging.getLogger(__name__)
_CALIBRATION_ANSWERS = 32


def prune_draft(
    source: Path, target: LocalTarget, traces: Sequence[Trace], step: PruneStep, out: Path
) -> DraftManifest:
    """Cut layers out of a draft, those that change their input least first."""
    manifest = extended(manifest_for(source, target), "prune", step)
    sample = _sample(traces, target, _CALIBRATION_ANSWERS) if step.measures else []
    draft = prune_layers(load_draft(source, "float32"), step.layers, step.by, sample)
    return save_draft(draft, out, manifest, target.tokenizer)


def quantize_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: QuantizeStep,
    out: Path,
) -> DraftManifest:
    """Round the weights of a draft, each unit to the bits that the step gives it.

    Raises:
        ModelError: the draft is quantized already.
        RecipeError: a plan that the draft cannot have.
        UserError: gptq without answers.
    """
    draft = load_draft(source, "float32")
    manifest = extended(manifest_for(source, target), "quantize", step)
    require_plain(draft)
    formats = unit_formats(
        draft.model, search_units(draft.model), step.bits, step.group, 8 if step.activation_bits == 8 else 16
    )
    if not formats:
        raise UserError("bits: every unit stays in 16 bits: there is nothing to round.")
    if HEAD in formats and draft.model.get_output_embeddings().weight is draft.model.get_input_embeddings().weight:
        _log.info(
            "The head is tied to the embedding and gets a matrix of its own in %d bits: a step reads fewer bytes, the "
            "folder holds both.",
            formats[HEAD].bits,
        )
    rounder: Rounder = round_to_nearest
    if step.method == "gptq":
        sample = _sample(traces, target, step.calibration)
        rounder = GptqRounder(draft.model, sample)
    rounded = quantize(draft, formats, rounder)
    _store_plain(rounded, source, step)
    sizes = [asdict(size) for size in unit_sizes(rounded.model)]
    manifest = replace(manifest, options={**manifest.options, "units": sizes})
    return save_draft(rounded, out, manifest, target.tokenizer)


def _sample(traces: Sequence[Trace], target: Speaker, count: int) -> list[Answer]:
    """Return as many answers as asked for, of every trace alike.

    Raises:
        UserError: there are none.
        TraceError: a trace was written in other tokens.
    """
    for trace in traces:
        require_same(trace, target.name, tokenizer_fingerprint=target.tokenizer_fingerprint)
    each = -(-count // max(len(traces), 1))
    found = [answer for trace in traces for answer in islice(trace.answers(), each) if answer.num_tokens]
    if not found:
        raise UserError("This is measured on answers of the target, and none was given: collect a trace (--trace).")
    return found


def _store_plain(draft: Draft, source: Path, step: QuantizeStep) -> None:
    """Bring the weights that were not rounded to the dtype they had on disk, or to bfloat16, in place."""
    stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stored = str(stated.get("dtype") or stated.get("torch_dtype") or "float32")
    if step.plain == "bfloat16" or stored == "bfloat16":
        draft.model.to(torch.bfloat16)
        draft.model.config.dtype = torch.bfloat16
