"""What each verb makes, from folders to folders. The pool chains them; the command line runs them alone."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from foredraft.acceptance.fitting import FittedLaw, fit_law
from foredraft.catalog import names, resolve, unknown_name_message
from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest, write_draft
from foredraft.core.errors import UnknownNameError, UserError
from foredraft.core.law import SamplingLaw
from foredraft.core.options import read_options
from foredraft.core.own_law import HasOwnLaws, OwnLaws
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.distill.documents import documents_digest, read_documents
from foredraft.distill.emphasis import read_position_weights
from foredraft.distill.init.build import build
from foredraft.distill.init.head import frequent_rows
from foredraft.distill.init.source import check_source, open_source
from foredraft.distill.leaks import without_leaks
from foredraft.distill.losses import read_loss
from foredraft.drafters import read_wrapper
from foredraft.export.plan import planned_length, slowdown_sentence
from foredraft.lineage import copy_files, extended, manifest_for, warn_of_changed_target
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.head import NO_IDS
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import LocalTarget
from foredraft.select.policies import read_policy
from foredraft.steps import (
    HeadStep,
    InitStep,
    LawStep,
    NgramStep,
    Step,
)
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, drawn_answers

_log = logging.getLogger(__name__)


def init_draft(target: LocalTarget, traces: Sequence[Trace], step: InitStep, out: Path) -> DraftManifest:
    """Write a draft as a step describes where it starts; a trimmed head keeps the traces' most frequent tokens."""
    head = frequent_rows(traces, target.tokenizer, step.vocab)
    sample = drawn_answers(traces, step.calibration) if step.measures else []
    built = build(target.model, open_source(target, step), step, sample)
    manifest = extended(blank_manifest(target, "causal-lm"), "init", step)
    manifest = replace(manifest, options={**manifest.options, **built.options})
    return save_draft(Draft(built.model, head), out, manifest, target.tokenizer)


def set_head(source: Path, target: LocalTarget, traces: Sequence[Trace], step: HeadStep, out: Path) -> DraftManifest:
    """Write the twin of a draft that computes other rows of its head; a folder holds all rows, whatever is computed."""
    rows = NO_IDS if step.rows == "full" else frequent_rows(traces, target.tokenizer, step.rows)
    draft = replace(load_draft(source), head_token_ids=rows)
    return save_draft(draft, out, extended(manifest_for(source, target), "head", step), target.tokenizer)


def set_law(
    source: Path, target: LocalTarget, traces: Sequence[Trace], step: LawStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Write the same draft with laws of its own, given or fitted to be accepted on the traces' answers.

    A fitted law is kept only where its gain over the target's own law is outside the noise of the prompts.

    Raises:
        UserError: the draft's guesses have no law, or there is no sampled trace to fit on.
    """
    manifest = extended(manifest_for(source, target), "law", step)
    drafter: Drafter = resolve("loaders", manifest.kind)(source, target.dtype)
    if not isinstance(drafter, HasOwnLaws):
        raise UserError(
            f"{source} is a drafter of kind {manifest.kind}: its guesses are certain, it has no law to set."
        )
    fits = _fitted(source.name, drafter, traces, step, progress) if step.is_fitted else []
    own = OwnLaws(tuple((fit.target_law, fit.law) for fit in fits), step.temperature, step.top_k)
    options = {**manifest.options, "own_laws": own.to_json(), "law_fits": [fit.to_json() for fit in fits]}
    manifest = replace(manifest, options=options, law=own.under(fits[0].target_law if fits else SamplingLaw()))
    return write_draft(out, manifest, lambda folder: copy_files(source, folder))


def _fitted(name: str, drafter: Drafter, traces: Sequence[Trace], step: LawStep, progress: Progress) -> list[FittedLaw]:
    sampled = [trace for trace in traces if not trace.info.law.is_greedy]
    if not sampled:
        raise UserError(
            "There is no law to fit: all traces are greedy, and under a greedy target a draft is greedy too. "
            "Collect a trace at a temperature, or give the draft's temperature."
        )
    k, answers = step.num_draft_tokens, step.answers
    return [fit_law(name, drafter, trace, k, answers=answers, progress=progress) for trace in sampled]


def export_draft(source: Path, target: LocalTarget, runtime: str, k: int, out: Path) -> Path:
    """Write a draft as `runtime` loads it, tuned to k draft tokens a block; return the folder.

    Args:
        runtime: A name of the catalog's group "exporters", with options: `llama.cpp:type=q8_0`.
        k: 0 takes the length with the best predicted speedup of those that were measured.
    """
    exporter, options = _exporter(runtime)
    measured: Mapping[str, Any] = {}
    if (source / MANIFEST).is_file():
        manifest = read_manifest(source)
        warn_of_changed_target(source, manifest, target)
        measured = manifest.measured
    length = k or planned_length(measured)
    if sentence := slowdown_sentence(measured, length):
        _log.warning("%s", sentence)
    exporter(source, target, length, out, **options)
    return out


def refuse_unknown_runtime(runtime: str) -> None:
    """Raise what export_draft would raise for the runtime's name alone."""
    _exporter(runtime)


def _exporter(runtime: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the exporter that is named, and the options given of those that it takes beside source, target, k, out."""
    exporter = resolve("exporters", runtime.partition(":")[0])
    taken = [option for option in signature(exporter).parameters.values() if option.default is not Parameter.empty]
    return exporter, read_options(runtime, {option.name: type(option.default) for option in taken})


def learns(step: Step) -> bool:
    """Return whether a step reads what the target wrote."""
    match step.verb:
        case "ngram":
            return needs_building(step.settings.kind) and step.settings.reads_trace
        case "init":
            return step.settings.vocab > 0 or step.settings.measures
        case "prune":
            return step.settings.measures
        case "quantize":
            return step.settings.method == "gptq"
        case "law":
            return step.settings.is_fitted
        case "head":
            return step.settings.rows != "full"
        case "low_rank":
            return step.settings.by == "inputs"
        case verb:
            return verb in ("distill", "adapt", "meta", "compress", "adaptive")


def text_keys(step: Step, held_out: Sequence[Prompt]) -> list[str]:
    """Return the identity of the general text that a step reads; empty where it reads none.

    Raises:
        CorpusError: there is no text, or prompts that are held out are in it.
    """
    match step.verb:
        case "distill":
            texts = [(text, text.leaks == "drop") for text in filter(None, [step.settings.text])]
        case "ngram":
            texts = [(text, False) for text in step.settings.texts]
        case _:
            texts = []
    return [documents_digest(without_leaks(read_documents(text), held_out, drop)) for text, drop in texts]


def is_reference(step: Step) -> bool:
    """Return whether a step only names a drafter that is made elsewhere or on the spot."""
    return step.verb in ("from", "checkpoint", "wrap") or (
        step.verb == "ngram" and not needs_building(step.settings.kind)
    )


def refuse_impossible(step: Step, target: LocalTarget) -> None:
    """Raise what a step would raise for its settings alone, before anything is made.

    Raises:
        UserError: a layer that the target does not have, or a kind or loss that is not known.
    """
    match step.verb:
        case "ngram":
            needs_building(step.settings.kind)
        case "init":
            check_source(target, step.settings)
        case "wrap":
            read_wrapper(step.settings)
        case "adaptive":
            read_policy(step.settings.policy)
        case "distill":
            for loss in step.settings.losses:
                read_loss(loss)
            read_position_weights(step.settings.position_weights)
        case "adapt" | "meta":
            for loss in step.settings.loss:
                read_loss(loss)


def needs_building(kind: str) -> bool:
    """Return whether a model-free kind is built from text rather than made on the spot.

    Raises:
        UnknownNameError: no such kind.
    """
    known = [*names("builders"), *names("drafters")]
    if kind not in known:
        raise UnknownNameError(unknown_name_message("drafter kind", kind, known))
    return kind in names("builders")


def model_free_spec(step: NgramStep) -> str:
    """Return the spec, as load_drafter reads it, of a model-free drafter that needs no building."""
    takes = signature(resolve("drafters", step.kind)).parameters
    options = {name: value for name, value in step.model_dump().items() if name in takes and name != "kind"}
    return f"{step.kind}:{','.join(f'{name}={value}' for name, value in options.items())}"
