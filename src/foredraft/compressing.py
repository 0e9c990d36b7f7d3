"""What the verbs that shrink drafts make, from folders to folders."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from foredraft.checkpoint import DraftManifest
from foredraft.compress.bnb import quantize_bnb
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench
from foredraft.compress.prune import layers_to_keep
from foredraft.compress.quantize import Rounder, quantize, require_plain, round_to_nearest, unit_sizes
from foredraft.core.errors import UserError
from foredraft.core.files import claimed
from foredraft.core.multiples import MULTIPLES, refuses_head_size, rounded_width
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Answer, Speaker
from foredraft.distill.init.head import frequent_rows
from foredraft.distill.init.heal import heal_linear
from foredraft.distill.init.width import narrow, require_plain_decoder
from foredraft.distill.init.widths import Shape, Widths, narrowed_shape
from foredraft.lineage import extended, manifest_for
from foredraft.models.calibration import calibration_batches
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft, save_draft, stored_dtype
from foredraft.models.layers import keep_layers
from foredraft.models.reopened import refuse_changed_logits
from foredraft.models.target import LocalTarget
from foredraft.models.units import HEAD, search_units
from foredraft.steps import PruneStep, QuantizeStep
from foredraft.trace.store import Trace, drawn_answers, require_same

_log = logging.getLogger(__name__)


def prune_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: PruneStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Cut layers, then widths, then rows of the head; heal what is left if asked for. What is written is plain.

    Raises:
        UserError: nothing would be left, there is nothing to measure on, or the runtime cannot load what would be.
        RecipeError: a width that the draft cannot have.
        ModelError: the draft is quantized already.
        OutputError: the folder exists already.
    """
    with claimed(out):
        draft = load_draft(source, "float32")
        manifest = extended(manifest_for(source, target), "prune", step)
        require_plain(draft)
        says = len(draft.head_token_ids) or len(target.tokenizer)
        if step.vocab >= says:
            raise UserError(f"vocab: {step.vocab} rows are no fewer than the {says} tokens that the draft can say.")
        sample = sample_answers(traces, target, step.answers) if step.measures else []
        widths = _rounded_widths(draft, step)
        kept = list(range(draft.model.config.get_text_config().num_hidden_layers))
        if step.layers:
            bench = bench_of(traces, step.answers, step.num_draft_tokens) if step.by == "acceptance" else None
            kept = layers_to_keep(draft, step.layers, step.by, sample, bench, step.num_draft_tokens, progress)
        model, channels = keep_layers(draft.model, kept), None
        if step.is_narrower:
            narrowed = narrow(model, widths, calibration_batches(sample))
            model, channels = narrowed.model, narrowed.channels
        repairs = []
        if step.heal == "linear" and (step.layers or step.is_narrower):
            repairs = heal_linear(
                model, draft.model, kept, calibration_batches(sample), every_layer=step.is_narrower, channels=channels
            )
        rows = draft.head_token_ids
        if step.vocab:
            rows = frequent_rows(traces, target.tokenizer, step.vocab)
        pruned = {"layers": kept, "widths": asdict(widths), "repairs": [repair.to_json() for repair in repairs]}
        manifest = replace(manifest, options={**manifest.options, "pruned": pruned})
        return save_draft(Draft(model, rows), out, manifest, target.tokenizer, refuse_changed_logits)


def _rounded_widths(draft: Draft, step: PruneStep) -> Widths:
    """Return the widths that are asked for, rounded up to what the runtime takes.

    Raises:
        ModelError: the draft is not built as Llama and Qwen2 are.
        UserError: the runtime would take heads for wider than they are, or nothing would be cut.
    """
    if not step.is_narrower:
        return Widths()
    require_plain_decoder(draft.model)
    config = draft.model.config.get_text_config()
    shape = Shape.of(config)
    hidden, ffn = (
        rounded_width(width, step.runtime, most) if width else 0
        for width, most in ((step.hidden, shape.hidden), (step.ffn, shape.ffn))
    )
    multiple = MULTIPLES.get(step.runtime, 1)
    for name, asked, given in (("hidden", step.hidden, hidden), ("ffn", step.ffn, ffn)):
        if asked != given:
            why = f"a multiple that {step.runtime} takes"
            if given % multiple:
                why = f"which is all of it, and no multiple of {multiple} as {step.runtime} takes them"
            _log.info("%s: %d is rounded to %d, %s.", name, asked, given, why)
    widths = Widths(hidden, step.heads, ffn)
    if widths.given:
        new = narrowed_shape(shape, widths)
        if new == shape and not (step.layers or step.vocab):
            raise UserError(
                f"Nothing would be cut: the draft has hidden {shape.hidden}, {shape.heads} heads and ffn {shape.ffn}. "
                "Ask for fewer, or for multiples that leave something out."
            )
        if refuses_head_size(step.runtime, config.model_type, new.hidden, new.heads, new.head_dim):
            raise UserError(
                f"{step.runtime} takes the heads of {config.model_type} to be hidden / heads wide, "
                f"{new.hidden / new.heads:g} and not {new.head_dim}: it cannot load hidden {new.hidden} with "
                f"{new.heads} heads. Keep hidden at {new.head_dim} times the heads, or prune ffn and layers."
            )
    return widths


def bench_of(traces: Sequence[Trace], answers: int, k: int) -> Bench:
    """Return the bench of the first trace: figures under several laws do not add up.

    Raises:
        UserError: there is no trace.
    """
    if not traces:
        raise UserError("Acceptance is measured on answers of the target, and none was given: collect a trace.")
    info = traces[0].info
    return Bench.of(traces[0].sample(answers), info.law, info.vocab_size, (k,))


def quantize_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: QuantizeStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Round the weights of a draft, each unit to the bits that the step gives it.

    Raises:
        ModelError: the draft is quantized already.
        RecipeError: a plan that the draft cannot have.
        UserError: gptq without answers.
        OutputError: the folder exists already.
    """
    with claimed(out):
        draft = load_draft(source, "float32")
        manifest = extended(manifest_for(source, target), "quantize", step)
        require_plain(draft)
        if step.format != "compressed-tensors":
            packed = quantize_bnb(source, draft, step.format)
            sizes = [asdict(size) for size in unit_sizes(packed.model)]
            manifest = replace(manifest, options={**manifest.options, "units": sizes})
            return save_draft(packed, out, manifest, target.tokenizer, refuse_changed_logits)
        formats = unit_formats(
            draft.model, search_units(draft.model), step.bits, step.group, 8 if step.activation_bits == 8 else 16
        )
        if not formats:
            raise UserError("bits: every unit stays in 16 bits: there is nothing to round.")
        _warn_of_small_groups(formats.values())
        if step.activation_bits == 8 and all(chosen.activation_bits == 16 for chosen in formats.values()):
            _log.warning("activation_bits has no effect: it goes with 8 bits and one scale a row.")
        if HEAD in formats and draft.model.get_output_embeddings().weight is draft.model.get_input_embeddings().weight:
            _log.info(
                "The head is tied to the embedding and gets a matrix of its own in %d bits: a step reads fewer bytes, "
                "the folder holds both.",
                formats[HEAD].bits,
            )
        rounder: Rounder = round_to_nearest
        if step.method == "gptq":
            sample = sample_answers(traces, target, step.calibration)
            rounder = GptqRounder(draft.model, sample)
        rounded = stored_as(quantize(draft, formats, rounder, progress), source, step.plain)
        sizes = [asdict(size) for size in unit_sizes(rounded.model)]
        manifest = replace(manifest, options={**manifest.options, "units": sizes})
        return save_draft(rounded, out, manifest, target.tokenizer, refuse_changed_logits)


def _warn_of_small_groups(formats: Iterable[WeightFormat]) -> None:
    """Say so where the 16 bits of each scale take as much as rounding saves."""
    for chosen in sorted(
        {one for one in formats if one.group and 16 / one.group >= one.bits}, key=lambda one: one.name
    ):
        _log.warning(
            "16 bits of scale for each group of %d makes %g bits a weight of %d: %d bits without groups take no more.",
            chosen.group, chosen.bits + 16 / chosen.group, chosen.bits, 2 * chosen.bits,
        )  # fmt: skip


def sample_answers(traces: Sequence[Trace], target: Speaker, count: int) -> list[Answer]:
    """Return as many answers as asked for; see drawn_answers.

    Raises:
        UserError: there are none.
        TraceError: a trace was written in other tokens.
    """
    for trace in traces:
        require_same(trace, target.name, tokenizer_fingerprint=target.tokenizer_fingerprint)
    found = drawn_answers(traces, count)
    if not found:
        raise UserError("This is measured on answers of the target, and none was given: collect a trace (--trace).")
    return found


def stored_as(draft: Draft, source: Path, plain: str = "keep") -> Draft:
    """Return the draft, changed in place: weights that are not rounded are in bfloat16 if `source` or `plain` says so.

    Those of a source in float16 stay in float32.
    """
    if plain == "bfloat16" or stored_dtype(source) == "bfloat16":
        # Not model.to: the rotary frequencies stay in float32, as they are when the folder is loaded.
        for weight in draft.model.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(torch.bfloat16)
        draft.model.config.dtype = torch.bfloat16
    return draft
