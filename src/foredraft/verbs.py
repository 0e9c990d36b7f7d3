"""What each verb makes, from folders to folders. The pool chains them; the command line runs them alone."""

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foredraft.acceptance.fitting import FittedLaw, fit_law
from foredraft.catalog import names, resolve, unknown_name_message
from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest, write_draft
from foredraft.compress.prune import prune_layers
from foredraft.compress.quantize import quantize_int8
from foredraft.core.errors import CheckpointError, ModelError, UnknownNameError, UserError, VocabMismatchError
from foredraft.core.law import SamplingLaw
from foredraft.core.own_law import HasOwnLaws, OwnLaws
from foredraft.core.processes import from_main
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter, Speaker
from foredraft.distill.adapt.guard import replay_both, why_old_stays
from foredraft.distill.adapt.learn import adapt
from foredraft.distill.adapt.meta import meta_learn
from foredraft.distill.adapt.objective import original_loss
from foredraft.distill.adapt.text import Division, Text, divide
from foredraft.distill.documents import documents_digest, read_documents
from foredraft.distill.emphasis import read_position_weights
from foredraft.distill.init.build import build
from foredraft.distill.init.head import rank_tokens
from foredraft.distill.init.shared import fold_factors, share_factors
from foredraft.distill.init.source import check_source, open_source
from foredraft.distill.leaks import without_leaks
from foredraft.distill.losses import read_loss
from foredraft.distill.resume import forget_points
from foredraft.distill.train import Distilled, distill
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.head import NO_IDS
from foredraft.models.loading import DTYPES, first_difference, load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.settings import Settings
from foredraft.steps import (
    AdaptStep,
    DistillStep,
    HeadStep,
    InitStep,
    LawStep,
    MetaStep,
    NgramStep,
    PruneStep,
    QuantizeStep,
    Step,
)
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, open_trace, require_same

_log = logging.getLogger(__name__)

_CALIBRATION_ANSWERS = 32


def init_draft(target: LocalTarget, traces: Sequence[Trace], step: InitStep, out: Path) -> DraftManifest:
    """Write a draft as a step describes where it starts; a trimmed head keeps the traces' most frequent tokens."""
    head = rank_tokens(_answer_ids(traces), target.tokenizer, step.vocab) if step.vocab else NO_IDS
    each = -(-step.calibration // max(len(traces), 1))
    sample = [answer for trace in traces if step.measures for answer in islice(trace.answers(), each)]
    built = build(target.model, open_source(target, step), step, sample)
    manifest = _extended(_blank(target, "causal-lm"), "init", step)
    manifest = replace(manifest, options={**manifest.options, **built.options})
    return save_draft(Draft(built.model, head), out, manifest, target.tokenizer)


def distill_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: DistillStep,
    out: Path,
    progress: Progress = SILENT,
    text_folder: Path | None = None,
    held_out: Sequence[Prompt] = (),
) -> DraftManifest:
    """Train a draft on the target's own answers. A killed run goes on where it was.

    Args:
        text_folder: Where what the target says of general text is kept; left out, beside `out`.
        held_out: Prompts that drafts are scored on, which must not be learnt from.
    """
    before = _manifest_for(source, target)
    _refuse_missing_files(source, before)
    points = out.with_name(f".{out.name}.training")
    texts = text_folder or out.with_name(f"{out.name}-text")
    places = tuple(trace.path for trace in traces)
    job = _Training(source, before.options.get("shared", {}), places, step, points, texts, tuple(held_out))
    from_main(job)
    distilled = job.run(target, traces, progress)
    fold_factors(distilled.draft.model)
    seen = before.training_tokens + distilled.training_tokens
    manifest = replace(_extended(before, "distill", step), training_tokens=seen, curve=distilled.entries())
    written = save_draft(distilled.draft, out, manifest, target.tokenizer)
    forget_points(points)
    return written


@dataclass(frozen=True, slots=True)
class _Training:
    """What the main process asks the others to train with it.

    Attributes:
        shared: Which matrices are taken apart into factors shared with the target, as the manifest says it.
    """

    source: Path
    shared: dict[str, Any]
    traces: tuple[Path, ...]
    step: DistillStep
    points: Path
    texts: Path
    held_out: tuple[Prompt, ...]

    def run(self, target: LocalTarget, traces: Sequence[Trace], progress: Progress) -> Distilled:
        draft = load_draft(self.source, "float32")
        if self.shared:
            model = share_factors(draft.model, target.model, self.shared["layers"], self.shared["rank"])
            draft = replace(draft, model=model)
        return distill(draft, traces, self.step, target, self.points, progress, self.texts, self.held_out)


def help_training(target: LocalTarget) -> None:
    """Train with the main process whatever it trains, until it dismisses its helpers.

    Raises:
        ForedraftError: what stops a training in one process stops it in all.
    """
    while isinstance(job := from_main(None), _Training):
        job.run(target, [open_trace(path) for path in job.traces], SILENT)


def dismiss_helpers() -> None:
    """Let the other processes go."""
    from_main(None)


def adapt_draft(
    source: Path,
    target: LocalTarget,
    served: Sequence[Text],
    old: Sequence[Trace],
    guards: Sequence[Trace],
    step: AdaptStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Let a draft learn from what was served; where that makes it worse, write the old draft again.

    Both are replayed over held-out prompts of what was served, and of the old domains. What was found, and which of
    the two was written, is in the manifest's options under "adapted": figures only, no text and no token.

    Args:
        served: What was gathered while decoding; see served_texts.
        old: Answers of the domains that the draft was trained on, rehearsed; a share of them only scores.
        guards: Other answers of those domains, which only score; then all of `old` is rehearsed.

    Raises:
        TraceError: too few prompts were served, or a trace is of another target.
        ModelError: the draft cannot be trained.
    """
    manifest = _manifest_for(source, target)
    new = divide(served, step.held_out, step.seed)
    known = _old_texts(old, guards, step, target)
    if not known.learn and step.lambda_task:
        _log.warning("lambda_task %g has no effect: there are no old answers to rehearse.", step.lambda_task)
    task, task_loss = original_loss(manifest.steps)
    draft = load_draft(source, "float32")
    adapted = adapt(draft, new.learn, known.learn, step, task_loss, progress)
    before: Drafter = CausalLMDrafter(draft, SamplingLaw(), target.vocab_size, own_laws=_own_laws(manifest))
    after: Drafter = CausalLMDrafter(adapted.draft, SamplingLaw(), target.vocab_size)
    shift = replay_both(before, after, new.held_out, step.num_draft_tokens)
    old_shift = replay_both(before, after, known.held_out, step.num_draft_tokens) if known.held_out else None
    reason = why_old_stays(shift, old_shift, step.max_old_loss)
    found = {
        "kept": "old" if reason else "new",
        "reason": reason,
        "task_loss": task,
        "answers": sum(len(text.rows) for text in served),
        "tokens": sum(text.num_tokens for text in served),
        "examined": sum(text.examined for text in served),
        "accepted": sum(text.accepted for text in served),
        "held_out": shift.to_json(),
        "old_domains": old_shift.to_json() if old_shift is not None else None,
    }
    curve = tuple(asdict(point) for point in adapted.curve)
    if reason:
        kept = replace(manifest, options={**manifest.options, "adapted": {**found, "curve": curve}})
        return write_draft(out, kept, lambda folder: _copy_files(source, folder))
    positions = adapted.curve[-1].positions if adapted.curve else 0
    manifest = replace(
        _extended(manifest, "adapt", step), training_tokens=manifest.training_tokens + positions, curve=curve
    )
    manifest = replace(manifest, options={**manifest.options, "adapted": found})
    return save_draft(adapted.draft, out, manifest, target.tokenizer)


def served_texts(folders: Sequence[Path | str], target: Speaker) -> list[Text]:
    """Return what buffers hold, or traces.

    Raises:
        TraceError: a folder is none, or was written by another target.
    """
    return [Text.of(_checked_trace(open_trace(folder), target)) for folder in folders]


def meta_draft(
    source: Path, target: LocalTarget, traces: Sequence[Trace], step: MetaStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Move a draft to where few steps adapt it to a new domain, learnt over the domains of the traces."""
    before = _manifest_for(source, target)
    texts = [Text.of(_checked_trace(trace, target)) for trace in traces]
    learned = meta_learn(load_draft(source, "float32"), texts, step, progress)
    seen = before.training_tokens + learned.curve[-1].positions
    curve = tuple(asdict(point) for point in learned.curve)
    manifest = replace(_extended(before, "meta", step), training_tokens=seen, curve=curve)
    return save_draft(learned.draft, out, manifest, target.tokenizer)


def _old_texts(old: Sequence[Trace], guards: Sequence[Trace], step: AdaptStep, target: LocalTarget) -> Division:
    learn = [Text.of(_checked_trace(trace, target), step.task_answers) for trace in old]
    if guards or not learn:
        return Division(tuple(learn), tuple(Text.of(_checked_trace(trace, target)) for trace in guards))
    return divide(learn, step.held_out, step.seed)


def _checked_trace(trace: Trace, target: Speaker) -> Trace:
    require_same(
        trace, target.name, target_fingerprint=target.fingerprint, tokenizer_fingerprint=target.tokenizer_fingerprint
    )
    return trace


def _own_laws(manifest: DraftManifest) -> OwnLaws:
    return OwnLaws.from_json(manifest.options.get("own_laws", {}))


def prune_draft(
    source: Path, target: LocalTarget, traces: Sequence[Trace], step: PruneStep, out: Path
) -> DraftManifest:
    """Cut layers out of a draft, those that change their input least first."""
    sample = [answer for trace in traces for answer in islice(trace.answers(), _CALIBRATION_ANSWERS)]
    draft = prune_layers(load_draft(source, "float32"), step.layers, step.by, sample)
    return save_draft(draft, out, _extended(_manifest_for(source, target), "prune", step), target.tokenizer)


def quantize_draft(source: Path, target: LocalTarget, step: QuantizeStep, out: Path) -> DraftManifest:
    """Round the weights of a draft's body to 8 bits, one scale a row."""
    draft = quantize_int8(load_draft(source, "float32"), step.activation_bits)
    return save_draft(draft, out, _extended(_manifest_for(source, target), "quantize", step), target.tokenizer)


def set_head(source: Path, target: LocalTarget, step: HeadStep, out: Path) -> DraftManifest:
    """Write the twin of a trimmed draft that computes every row of its head."""
    draft = replace(load_draft(source), head_token_ids=NO_IDS)
    return save_draft(draft, out, _extended(_manifest_for(source, target), "head", step), target.tokenizer)


def set_law(
    source: Path, target: LocalTarget, traces: Sequence[Trace], step: LawStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Write the same draft with laws of its own, given or fitted to be accepted on the traces' answers.

    A fitted law is kept only where its gain over the target's own law is outside the noise of the prompts.

    Raises:
        UserError: the draft's guesses have no law, or there is no sampled trace to fit on.
    """
    manifest = _extended(_manifest_for(source, target), "law", step)
    drafter: Drafter = resolve("loaders", manifest.kind)(source, target.dtype)
    if not isinstance(drafter, HasOwnLaws):
        raise UserError(
            f"{source} is a drafter of kind {manifest.kind}: its guesses are certain, it has no law to set."
        )
    fits = _fitted(source.name, drafter, traces, step, progress) if step.is_fitted else []
    own = OwnLaws(tuple((fit.target_law, fit.law) for fit in fits), step.temperature, step.top_k)
    options = {**manifest.options, "own_laws": own.to_json(), "law_fits": [fit.to_json() for fit in fits]}
    manifest = replace(manifest, options=options, law=own.under(fits[0].target_law if fits else SamplingLaw()))
    return write_draft(out, manifest, lambda folder: _copy_files(source, folder))


def _fitted(name: str, drafter: Drafter, traces: Sequence[Trace], step: LawStep, progress: Progress) -> list[FittedLaw]:
    sampled = [trace for trace in traces if not trace.info.law.is_greedy]
    if not sampled:
        raise UserError(
            "There is no law to fit: all traces are greedy, and under a greedy target a draft is greedy too. "
            "Collect a trace at a temperature, or give the draft's temperature."
        )
    k, answers = step.num_draft_tokens, step.answers
    return [fit_law(name, drafter, trace, k, answers=answers, progress=progress) for trace in sampled]


def _copy_files(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif file.name != MANIFEST:
            shutil.copyfile(file, folder / file.name)


def build_ngram(
    target: Speaker, traces: Sequence[Trace], step: NgramStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Build a model-free drafter from what the target wrote."""
    manifest = _extended(_blank(target, step.kind), "ngram", step)
    return resolve("builders", step.kind)(_answer_ids(traces), target.vocab_size, step, manifest, out, progress)


def export_draft(source: Path, target: LocalTarget, runtime: str, k: int, out: Path) -> Path:
    """Write a draft as `runtime` loads it, tuned to k draft tokens a block."""
    if (source / MANIFEST).is_file():
        _warn_of_changed_target(source, read_manifest(source), target)
    resolve("exporters", runtime)(source, target, k, out)
    return out


def learns(step: Step) -> bool:
    """Return whether a step reads what the target wrote."""
    match step.verb:
        case "ngram":
            return needs_building(step.settings.kind)
        case "init":
            return step.settings.vocab > 0 or step.settings.measures
        case "prune":
            return step.settings.by == "block-influence"
        case "law":
            return step.settings.is_fitted
        case verb:
            return verb in ("distill", "adapt", "meta")


def text_keys(step: Step, held_out: Sequence[Prompt]) -> list[str]:
    """Return the identity of the general text that a step reads; empty where it reads none.

    Raises:
        CorpusError: there is no text, or prompts that are held out are in it.
    """
    if step.verb != "distill" or step.settings.text is None:
        return []
    settings = step.settings.text
    documents = without_leaks(read_documents(settings), held_out, settings.leaks == "drop")
    return [documents_digest(documents)]


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
            _wrapper(step.settings)
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


def load_drafter(spec: str, target: Speaker, trust_remote_code: bool = False) -> Drafter:
    """Return the drafter that `spec` names: a folder, a hub id, or `kind:option=value,...`.

    Behind it may stand ways of drafting, each applied to what stands before it: `draft+tree:max_nodes=16,width=4`,
    `draft+confident:threshold=0.4`, `small+cascade:middle=draft`.

    Raises:
        VocabMismatchError: it does not speak the target's tokens; the message names the first difference.
        UnknownNameError: it is no folder and no known kind.
        UserError: a way of drafting does not take such options.
    """
    base, *wraps = split_spec(spec)
    drafter = _load_plain(base, target, trust_remote_code)
    for wrap in wraps:
        factory, options = _wrapper(wrap)
        drafter = factory(drafter, partial(load_drafter, target=target, trust_remote_code=trust_remote_code), **options)
    return drafter


def split_spec(spec: str) -> list[str]:
    """Return what a spec starts from, and the ways of drafting behind it."""
    return re.split(rf"\+(?=(?:{'|'.join(names('wrappers'))})(?:[:+]|$))", spec)


def _wrapper(wrap: str) -> tuple[Callable[..., Drafter], dict[str, Any]]:
    """Return what makes one drafter of another, and its options.

    Raises:
        UnknownNameError: no such way of drafting.
        UserError: it does not take such an option.
    """
    name, _, written = wrap.partition(":")
    factory = resolve("wrappers", name)
    takes = dict(list(signature(factory).parameters.items())[2:])  # behind the drafter and what loads others
    options: dict[str, Any] = {}
    for option, value in _options(written, wrap).items():
        if option not in takes:
            raise UserError(f"{wrap}: {name} takes {', '.join(takes)}, not {option}.")
        kind = type(takes[option].default)
        if not (isinstance(value, kind) or (kind is float and isinstance(value, int))):
            raise UserError(f"{wrap}: {option} is a {kind.__name__}, not {value!r}.")
        options[option] = kind(value)
    return factory, options


def _load_plain(spec: str, target: Speaker, trust_remote_code: bool) -> Drafter:
    path = Path(spec)
    kind, _, options = spec.partition(":")
    if (path / MANIFEST).is_file():
        return resolve("loaders", _manifest_for(path, target).kind)(path, _draft_dtype(target))
    if kind in names("drafters"):
        return resolve("drafters", kind)(target.vocab_size, **_options(options, spec))
    if path.exists() or "/" in spec:
        return _foreign_draft(spec, target, trust_remote_code)
    message = unknown_name_message("drafter", spec, names("drafters"))
    raise UnknownNameError(f"{message} A draft folder or a hub id will do too.")


def _foreign_draft(spec: str, target: Speaker, trust_remote_code: bool) -> Drafter:
    loaded = load_causal_lm(spec, _draft_dtype(target), trust_remote_code)
    if loaded.tokenizer_fingerprint != target.tokenizer_fingerprint:
        difference = "their tokenizers are not the same"
        if isinstance(target, LocalTarget):
            difference = first_difference(loaded.tokenizer, target.tokenizer)
        raise VocabMismatchError(f"{spec} does not speak the tokens of {target.name}: {difference}.")
    return CausalLMDrafter(Draft(loaded.model), SamplingLaw(), target.vocab_size)


def _draft_dtype(target: Speaker) -> str:
    """Return what drafts compute in: what the target does, unless it is not here or of another kind, such as Q4_K."""
    return target.dtype if target.dtype in DTYPES else "auto"


def _manifest_for(source: Path, target: Speaker) -> DraftManifest:
    if not (source / MANIFEST).is_file():
        if not (source / "config.json").is_file():
            raise ModelError(f"{source} is no draft: it has neither {MANIFEST} nor config.json.")
        return _blank(target, "causal-lm")
    manifest = read_manifest(source)
    if (manifest.vocab_size, manifest.tokenizer_fingerprint) != (target.vocab_size, target.tokenizer_fingerprint):
        raise VocabMismatchError(
            f"{source} was made for {manifest.target} ({manifest.vocab_size} tokens, tokenizer "
            f"{manifest.tokenizer_fingerprint[:8]}), not for {target.name} ({target.vocab_size} tokens, "
            f"{target.tokenizer_fingerprint[:8]}). Make a draft from this target."
        )
    _warn_of_changed_target(source, manifest, target)
    return manifest


def _refuse_missing_files(source: Path, manifest: DraftManifest) -> None:
    for name in manifest.files:
        if not (source / name).is_file():
            raise CheckpointError(
                f"{source} lacks {name}: the draft is only half there. Delete the folder and run the command that "
                "made it again."
            )


def _warn_of_changed_target(source: Path, manifest: DraftManifest, target: Speaker) -> None:
    if manifest.target_fingerprint != target.fingerprint:
        _log.warning(
            "The target behind %s has changed: it was made for %s with %s, this is %s with %s (other weights, settings "
            "or precision). Its recorded figures are of the other target.",
            source, manifest.target, manifest.target_fingerprint[:8], target.name, target.fingerprint[:8],
        )  # fmt: skip


def _blank(target: Speaker, kind: str) -> DraftManifest:
    return DraftManifest(kind, target.vocab_size, target.name, target.fingerprint, target.tokenizer_fingerprint)


def _extended(manifest: DraftManifest, verb: str, step: Settings) -> DraftManifest:
    done = {verb: step.model_dump(by_alias=True)}
    parents = (manifest.digest,) if manifest.files else ()
    manifest = replace(
        manifest, steps=(*manifest.steps, done), parents=(*manifest.parents, *parents), measured={}, curve=()
    )
    if verb in ("law", "head"):
        return manifest
    # A law that was fitted to other weights says nothing of the new ones.
    dropped = (
        {"own_laws", "law_fits", "adapted"} if verb == "distill" else {"own_laws", "law_fits", "adapted", "shared"}
    )
    options = {name: value for name, value in manifest.options.items() if name not in dropped}
    return replace(manifest, options=options, law=SamplingLaw())


def _answer_ids(traces: Sequence[Trace]) -> list[np.ndarray]:
    return [row.answer_ids.numpy().astype(np.int32) for trace in traces for row in trace.rows(tops=False)]


def _options(text: str, spec: str) -> dict[str, int | float | str]:
    options = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        if not separator:
            raise UserError(f"{spec}: {part!r} is no option; write kind:option=value,option=value.")
        options[name] = yaml.safe_load(value)
    return options
