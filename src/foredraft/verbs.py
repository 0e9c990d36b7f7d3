"""What each verb makes, from folders to folders. The pool chains them; the command line runs them alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import yaml

from foredraft.catalog import names, resolve, unknown_name_message
from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest
from foredraft.compress.prune import prune_layers
from foredraft.compress.quantize import quantize_int8
from foredraft.core.errors import ModelError, UnknownNameError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter, Speaker
from foredraft.decoding.speculative import Limits, decode, plain_decode
from foredraft.distill.init import init_from_target, parse_layers, rank_tokens
from foredraft.distill.resume import forget_points
from foredraft.distill.train import distill
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.head import NO_IDS
from foredraft.models.loading import DTYPES, first_difference, load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.recipe import DistillStep, HeadStep, InitStep, NgramStep, PruneStep, QuantizeStep, Settings, Step
from foredraft.trace.prompts import NO_DOMAIN, Prompt, render
from foredraft.trace.store import Trace

_CALIBRATION_ANSWERS = 32


def init_draft(target: LocalTarget, traces: Sequence[Trace], step: InitStep, out: Path) -> DraftManifest:
    """Write a draft of some of the target's layers; a trimmed head keeps the traces' most frequent tokens."""
    layers = parse_layers(step.layers, target.model.config.num_hidden_layers)
    head = rank_tokens(_answer_ids(traces), target.tokenizer, step.vocab) if step.vocab else NO_IDS
    draft = init_from_target(target.model, layers, head)
    return save_draft(draft, out, _extended(_blank(target, "causal-lm"), "init", step), target.tokenizer)


def distill_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: DistillStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Train a draft on the target's own answers. A killed run goes on where it was."""
    before = _manifest_for(source, target)
    points = out.with_name(f".{out.name}.training")
    distilled = distill(load_draft(source, "float32"), traces, step, target, points, progress)
    seen = before.training_tokens + distilled.training_tokens
    curve = tuple(asdict(point) for point in distilled.curve)
    manifest = replace(_extended(before, "distill", step), training_tokens=seen, curve=curve)
    written = save_draft(distilled.draft, out, manifest, target.tokenizer)
    forget_points(points)
    return written


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


def build_ngram(
    target: Speaker, traces: Sequence[Trace], step: NgramStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Build a model-free drafter from what the target wrote."""
    manifest = _extended(_blank(target, step.kind), "ngram", step)
    return resolve("builders", step.kind)(_answer_ids(traces), target.vocab_size, step, manifest, out, progress)


def export_draft(source: Path, target: LocalTarget, runtime: str, k: int, out: Path) -> Path:
    """Write a draft as `runtime` loads it, tuned to k draft tokens a block."""
    resolve("exporters", runtime)(source, target, k, out)
    return out


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer in words, and what it took."""

    text: str
    tokens: int
    target_calls: int
    seconds: float

    @property
    def mean_tokens_per_call(self) -> float:
        return self.tokens / self.target_calls

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def generate(
    target: LocalTarget,
    drafter: Drafter | None,
    prompt: str,
    law: SamplingLaw = GREEDY,
    k: int = 4,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Generated:
    """Answer one user turn by speculative decoding, plainly where there is no drafter. The law is the target's."""
    prompt_ids = render(Prompt("prompt", NO_DOMAIN, ({"role": "user", "content": prompt},)), target.tokenizer)
    limits = Limits(max_new_tokens, target.stop_ids, target.max_context)
    generator = torch.Generator().manual_seed(seed)
    if drafter is None:
        decoded = plain_decode(target.session(), prompt_ids, law, limits, generator)
    else:
        decoded = decode(target.session(), drafter.bind(law), prompt_ids, law, k, limits, generator)
    text = target.tokenizer.decode(decoded.token_ids, skip_special_tokens=True)
    return Generated(text, len(decoded.token_ids), decoded.target_calls, decoded.seconds)


def learns(step: Step) -> bool:
    """Return whether a step reads what the target wrote."""
    match step.verb:
        case "ngram":
            return needs_building(step.settings.kind)
        case "init":
            return step.settings.vocab > 0
        case "prune":
            return step.settings.by == "block-influence"
        case verb:
            return verb == "distill"


def is_reference(step: Step) -> bool:
    """Return whether a step only names a drafter that is made elsewhere or on the spot."""
    return step.verb in ("from", "checkpoint") or (step.verb == "ngram" and not needs_building(step.settings.kind))


def refuse_impossible(step: Step, target: LocalTarget) -> None:
    """Raise what a step would raise for its settings alone, before anything is made.

    Raises:
        UserError: a layer that the target does not have, or a kind or loss that is not known.
    """
    match step.verb:
        case "ngram":
            needs_building(step.settings.kind)
        case "init":
            parse_layers(step.settings.layers, target.model.config.num_hidden_layers)
        case "distill":
            for loss in filter(None, (*step.settings.loss, step.settings.finish)):
                resolve("losses", loss)


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

    Raises:
        VocabMismatchError: it does not speak the target's tokens; the message names the first difference.
        UnknownNameError: it is no folder and no known kind.
    """
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
    return manifest


def _blank(target: Speaker, kind: str) -> DraftManifest:
    return DraftManifest(kind, target.vocab_size, target.name, target.fingerprint, target.tokenizer_fingerprint)


def _extended(manifest: DraftManifest, verb: str, step: Settings) -> DraftManifest:
    done = {verb: step.model_dump(by_alias=True)}
    parents = (manifest.digest,) if manifest.files else ()
    return replace(
        manifest, steps=(*manifest.steps, done), parents=(*manifest.parents, *parents), measured={}, curve=()
    )


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
