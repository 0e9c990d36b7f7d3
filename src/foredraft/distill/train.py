"""Distillation: teach a draft the target's law on answers that the target wrote.

The draft is the student, the target the teacher. Only the body and the final norm learn; embeddings and head stay
the target's, so that a trimmed head remains a slice of them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from foredraft.core.digest import digest_of
from foredraft.core.errors import CheckpointError
from foredraft.core.processes import from_main, processes
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.data import Group, num_positions, plan_steps, read_groups
from foredraft.distill.emphasis import Emphasis
from foredraft.distill.leaks import refuse_leaked_answers
from foredraft.distill.limits import require_laws
from foredraft.distill.live import LiveTarget
from foredraft.distill.loop import Step, Training, named
from foredraft.distill.matching import Matching
from foredraft.distill.optimizer import Updater
from foredraft.distill.parallel import whole
from foredraft.distill.resume import CurvePoint, ResumePoint, Rollback, load_point, save_point
from foredraft.distill.rollouts import OnPolicy
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Student, finished
from foredraft.distill.text import Texts, gather_texts
from foredraft.distill.tracking import open_tracker
from foredraft.distill.validation import Validated, Validation, hold_out
from foredraft.models.draft import Draft
from foredraft.models.loading import model_fingerprint
from foredraft.models.target import LocalTarget
from foredraft.steps import DistillStep
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, require_written_by

# What may change between a kill and the next start: it changes no weight.
_WITHOUT_EFFECT = {"checkpoint_every", "track"}


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a training gave.

    Attributes:
        draft: The draft with the most tokens per call on held-out prompts, or the last one where nothing was held
            out; in the dtype it came in.
        curve: One entry for each optimizer step that counted.
        rollbacks: Steps that were not finite, or whose loss ran away, and were taken back.
        validations: Replays on held-out prompts, the first one before the first step.
    """

    draft: Draft
    curve: tuple[CurvePoint, ...]
    rollbacks: tuple[Rollback, ...]
    validations: tuple[Validated, ...] = ()

    @property
    def training_tokens(self) -> int:
        """Answer positions trained on, repeats included."""
        return self.curve[-1].positions

    def entries(self) -> tuple[dict[str, Any], ...]:
        """Return the curve as plain values; steps behind which the draft was replayed say what that gave."""
        replayed = {
            seen.positions: {
                "mean_tokens_per_call": seen.mean_tokens_per_call,
                "expected_acceptance": seen.expected_acceptance,
            }
            for seen in self.validations
        }
        return tuple(asdict(point) | replayed.get(point.positions, {}) for point in self.curve)


def distill(
    draft: Draft,
    traces: Sequence[Trace],
    settings: DistillStep,
    target: LocalTarget,
    work: Path,
    progress: Progress = SILENT,
    text_folder: Path | None = None,
    held_out: Sequence[Prompt] = (),
) -> Distilled:
    """Return a trained copy of `draft`, which is left as it was.

    Killed at any moment and called again with the same arguments, it goes on from the last point in
    `work` and gives the same weights, bit for bit, on the same machine and number of threads.

    Where several processes have met, all of them call it with the same arguments and train together.

    Args:
        draft: Any decoder that transformers runs with a replaceable attention; trained in float32.
        traces: Answers of the target, under one or several laws.
        settings: Losses, lengths and rates; see DistillStep.
        target: Who wrote the traces. Run only where it is matched or its laws are read live.
        work: Folder for points to resume from; `forget_points` removes it once the draft is saved. All processes
            see it.
        progress: Counts answer positions.
        text_folder: Where what the target says of general text is kept for other trainings; left out, beside `work`.
        held_out: Prompts that drafts are scored on, which must not be learnt from.

    Raises:
        TraceError: a trace of another target or tokenizer, without answers, or with one to a prompt that is held out.
        CorpusError: there is no general text where it is asked for, or prompts that are held out are in it.
        UnknownNameError: a loss that the catalog does not know, or a tracker that accelerate does not.
        MissingExtraError: the optimizer or the tracker needs a package that is not there.
        ModelError: the draft has nothing to train, or cannot be run on packed text.
        UserError: settings that this draft or this machine does not allow.
        NonFiniteError: the loss stayed NaN, infinite or too high after many rollbacks.
        CheckpointError: `work` holds the points of another training.
    """
    for trace in traces:
        require_written_by(trace, target)
    if settings.laws == "cached":
        require_laws(settings.losses, traces)
    refuse_leaked_answers(traces, held_out, target.tokenizer)
    groups, validated = hold_out(
        read_groups(traces, settings.laws == "cached"), settings.validation.prompts, settings.seed
    )
    folder = text_folder or work.with_name(f"{work.name}-text")
    texts = _texts(target, traces, settings, folder, held_out, progress)
    plan = _plan(groups, settings, texts.groups)
    student = Student.of(draft, settings, processes())
    trained = list(student.weights)
    student.live = LiveTarget(target.model, len(target.tokenizer), student.row_of_token)
    matching = Matching.of(target.model, student.model, settings)
    student.adopt(matching.weights)
    training = Training(
        student=student,
        schedule=Schedule.of(settings),
        matching=matching,
        emphasis=Emphasis.of(settings, draft),
        plan=plan,
        on_policy=_on_policy(draft, target, settings, len(plan)),
        updater=Updater(settings.optimizer, student.weights, settings.weight_decay),
        validation=Validation(traces, validated, settings.validation, settings.tokens),
        tracker=open_tracker(settings.track, work.with_name(f"{work.name}-figures"), _plain(settings)),
    )
    key = _key(draft, traces, settings, texts)
    point = training.run(_start(work, key, student), lambda point: _save(point, work, key), progress)
    best = {name: whole(point.tensors[f"{training.chosen}.{name}"]) for name in trained}
    return Distilled(finished(draft, settings, best), point.curve, point.rollbacks, point.validations)


def _texts(
    target: LocalTarget,
    traces: Sequence[Trace],
    settings: DistillStep,
    folder: Path,
    held_out: Sequence[Prompt],
    progress: Progress,
) -> Texts:
    if settings.text is None:
        return Texts()
    positions = math.ceil(settings.text.share * settings.tokens)
    gather = partial(gather_texts, target, settings.text, traces[0].info.stored_law, positions, folder, held_out)
    if processes().is_main:
        texts = gather(progress)
        from_main(texts.digest)
        return texts
    from_main(None)  # The main process has gathered what is read now.
    return gather(SILENT)


def _on_policy(draft: Draft, target: LocalTarget, settings: DistillStep, num_steps: int) -> OnPolicy | None:
    if settings.rollouts is None:
        return None
    num_tokens, stops = len(target.tokenizer), target.stop_ids
    return OnPolicy(settings.rollouts, num_steps, settings.seed, draft.head_token_ids, num_tokens, stops)


def _plan(groups: Sequence[Group], settings: DistillStep, texts: Sequence[Group] = ()) -> list[Step]:
    every, share = (*groups, *texts), settings.text.share if settings.text else 0.0
    steps = [
        tuple(every[index] for index in step)
        for step in plan_steps(groups, settings.tokens, settings.batch_tokens, settings.seed, texts, share)
    ]
    return [
        Step(step, end)
        for step, end in zip(steps, accumulate(sum(map(num_positions, step)) for step in steps), strict=True)
    ]


def _start(work: Path, key: str, student: Student) -> ResumePoint:
    point = load_point(work, key) or ResumePoint(0, named("weight", student.weights))
    if from_main(point.step) != point.step:
        raise CheckpointError(f"{work} is not the same folder for all processes: put the run where all of them see it.")
    return point


def _save(point: ResumePoint, work: Path, key: str) -> None:
    tensors = {name: whole(tensor) for name, tensor in point.tensors.items()}
    if processes().is_main:
        save_point(replace(point, tensors=tensors), work, key)


def _plain(settings: DistillStep) -> dict[str, Any]:
    """Return the settings as trackers take them: numbers, words, and the rest written out."""
    return {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in settings.model_dump().items()
    }


def _key(draft: Draft, traces: Sequence[Trace], settings: DistillStep, texts: Texts) -> str:
    return digest_of(
        [
            settings.model_dump(exclude=_WITHOUT_EFFECT),
            [trace.digest for trace in traces],
            texts.digest,
            model_fingerprint(draft.model),
            draft.head_token_ids.tolist(),
        ]
    )
