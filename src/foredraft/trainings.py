"""What the verbs that train make, from folders to folders, alone or on several processes."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.checkpoint import DraftManifest, write_draft
from foredraft.core.files import claimed
from foredraft.core.law import SamplingLaw
from foredraft.core.own_law import OwnLaws
from foredraft.core.processes import from_main
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter, Speaker
from foredraft.distill.adapt.guard import replay_both, why_old_stays
from foredraft.distill.adapt.learn import adapt
from foredraft.distill.adapt.meta import meta_learn
from foredraft.distill.adapt.objective import original_loss
from foredraft.distill.adapt.text import Division, Text, divide
from foredraft.distill.init.shared import fold_factors, share_factors
from foredraft.distill.resume import forget_points
from foredraft.distill.train import Distilled, distill
from foredraft.lineage import copy_files, extended, manifest_for, refuse_missing_files
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import load_draft, save_draft
from foredraft.models.target import LocalTarget
from foredraft.steps import (
    AdaptStep,
    DistillStep,
    MetaStep,
)
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, open_trace, require_written_by

_log = logging.getLogger(__name__)


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
    with claimed(out):
        before = manifest_for(source, target)
        refuse_missing_files(source, before)
        points = out.with_name(f".{out.name}.training")
        texts = text_folder or out.with_name(f"{out.name}-text")
        places = tuple(trace.path for trace in traces)
        job = _Training(source, before.options.get("shared", {}), places, step, points, texts, tuple(held_out))
        from_main(job)
        distilled = job.run(target, traces, progress)
        fold_factors(distilled.draft.model)
        seen = before.training_tokens + distilled.training_tokens
        manifest = replace(extended(before, "distill", step), training_tokens=seen, curve=distilled.entries())
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
    with claimed(out):
        manifest = manifest_for(source, target)
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
            return write_draft(out, kept, lambda folder: copy_files(source, folder))
        positions = adapted.curve[-1].positions if adapted.curve else 0
        manifest = replace(
            extended(manifest, "adapt", step), training_tokens=manifest.training_tokens + positions, curve=curve
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
    with claimed(out):
        before = manifest_for(source, target)
        texts = [Text.of(_checked_trace(trace, target)) for trace in traces]
        learned = meta_learn(load_draft(source, "float32"), texts, step, progress)
        seen = before.training_tokens + learned.curve[-1].positions
        curve = tuple(asdict(point) for point in learned.curve)
        manifest = replace(extended(before, "meta", step), training_tokens=seen, curve=curve)
        return save_draft(learned.draft, out, manifest, target.tokenizer)


def _old_texts(old: Sequence[Trace], guards: Sequence[Trace], step: AdaptStep, target: LocalTarget) -> Division:
    learn = [Text.of(_checked_trace(trace, target), step.task_answers) for trace in old]
    if guards or not learn:
        return Division(tuple(learn), tuple(Text.of(_checked_trace(trace, target)) for trace in guards))
    return divide(learn, step.held_out, step.seed)


def _checked_trace(trace: Trace, target: Speaker) -> Trace:
    require_written_by(trace, target)
    return trace


def _own_laws(manifest: DraftManifest) -> OwnLaws:
    return OwnLaws.from_json(manifest.options.get("own_laws", {}))
