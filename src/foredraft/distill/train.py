"""Distillation: teach a draft the target's law on answers that the target wrote.

The draft is the student, the target the teacher. Only the body and the final norm learn; embeddings and head stay
the target's, so that a trimmed head remains a slice of them.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import CheckpointError, NonFiniteError
from foredraft.core.processes import from_main, processes
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.data import Group, num_positions, plan_steps, read_groups
from foredraft.distill.divergence import DivergenceWatch
from foredraft.distill.emphasis import Emphasis
from foredraft.distill.leaks import refuse_leaked_answers
from foredraft.distill.limits import require_laws
from foredraft.distill.live import LiveTarget
from foredraft.distill.matching import Matching
from foredraft.distill.optimizer import Updater, clip_gradients
from foredraft.distill.parallel import like, whole
from foredraft.distill.resume import CurvePoint, ResumePoint, Rollback, load_point, save_point
from foredraft.distill.rollouts import OnPolicy
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Figures, Student, finished
from foredraft.distill.text import Texts, gather_texts
from foredraft.distill.tracking import Tracker, open_tracker
from foredraft.distill.validation import Validated, Validation, best_of, hold_out
from foredraft.models.draft import Draft
from foredraft.models.loading import model_fingerprint
from foredraft.models.target import LocalTarget
from foredraft.steps import DistillStep
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, require_same

_log = logging.getLogger(__name__)

_POSITIONS_BETWEEN_POINTS = 4096
_MOST_ROLLBACKS = 10
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
        require_same(
            trace,
            target.name,
            target_fingerprint=target.fingerprint,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
        )
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
    training = _Training(
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


@dataclass(frozen=True, slots=True)
class _Step:
    """The groups of one optimizer step, and the answer positions trained on when it is done."""

    groups: tuple[Group, ...]
    end: int


@final
class _Training:
    """The loop: a plan of steps, an optimizer, replays on held-out prompts, and the last good point to fall back to."""

    def __init__(
        self,
        student: Student,
        schedule: Schedule,
        matching: Matching,
        emphasis: Emphasis | None,
        plan: Sequence[_Step],
        on_policy: OnPolicy | None,
        updater: Updater,
        validation: Validation,
        tracker: Tracker,
    ) -> None:
        self._on_policy = on_policy
        self._student = student
        self._schedule = schedule
        self._matching = matching
        self._emphasis = emphasis
        self._plan = plan
        self._updater = updater
        self._validation = validation
        self._tracker = tracker
        self._curve: list[CurvePoint] = []
        self._rollbacks: list[Rollback] = []
        self._validations: list[Validated] = []
        self._best: dict[str, Tensor] = {}
        self._clock = 0.0
        self._watch = DivergenceWatch(schedule.settings.divergence, schedule.settings.divergence_steps)

    @property
    def chosen(self) -> str:
        """Which weights of the last point are the result: the best ones where there was anything to tell them by."""
        return "best" if self._validation.is_on else "weight"

    def run(self, start: ResumePoint, save: Callable[[ResumePoint], None], progress: Progress) -> ResumePoint:
        """Do the steps that are left; return the last point, saved."""
        self._take_up(start)
        first = start.step
        done = self._end_of(first)
        self._clock, saved = (
            time.perf_counter() - (start.curve[-1].seconds if start.curve else 0.0),
            time.perf_counter(),
        )
        with progress.task("distilling", float(self._plan[-1].end), "positions", float(done)) as task:
            if self._validation.is_on and not self._validations:
                self._validate(0)
            for step in range(first, len(self._plan)):
                if self._validation.has_given_up(self._validations):
                    break
                self._step(step)
                end = self._plan[step].end
                if self._validation.is_due(done, end, step + 1 == len(self._plan)):
                    self._validate(step + 1)
                task.advance(float(end - done))
                task.note(self._note())
                last = step + 1 == len(self._plan) or self._validation.has_given_up(self._validations)
                if last or self._is_time_for_a_point(end):
                    self._good = self._point(step + 1)
                    if from_main(last or time.perf_counter() - saved >= self._schedule.settings.checkpoint_every):
                        save(self._good)
                        saved = time.perf_counter()
                done = end
        self._tracker.finish()
        if not self._curve:
            raise self._hopeless()
        self._say_what_is_kept()
        return self._good

    def _step(self, step: int) -> None:
        share = step / len(self._plan)
        if self._begins_a_phase(step):
            self._watch.start_over()
        groups: Sequence[Group] = self._plan[step].groups
        if self._on_policy is not None:
            groups = self._on_policy.groups(step, groups, self._student)
        figures = self._student.backward(groups, self._schedule.loss(share), self._matching.at(share), self._emphasis)
        norm = clip_gradients(self._student.weights.values(), self._schedule.settings.clip)
        if not (math.isfinite(figures.loss) and math.isfinite(norm)):
            self._roll_back(step, "not finite")
        elif self._watch.has_diverged(figures.loss):
            self._roll_back(step, "too high")
        else:
            self._update(step, figures, norm)

    def _update(self, step: int, figures: Figures, norm: float) -> None:
        rate = self._schedule.learning_rate(step / len(self._plan), 1 / len(self._plan)) * self._rate_factor
        self._updater.step(rate)
        point = CurvePoint(self._plan[step].end, self._seconds, figures.loss, figures.acceptance, rate, norm)
        self._curve.append(point)
        self._tracker.log(asdict(point), step)

    def _validate(self, step: int) -> None:
        with self._student.precision():
            tokens_per_call, acceptance = self._validation.replay(self._student.draft(), self._student.processes)
        if not math.isfinite(tokens_per_call):
            return  # The next step's loss is not finite either, and is taken back.
        seen = Validated(step, self._end_of(step), self._seconds, tokens_per_call, acceptance)
        self._validations.append(seen)
        self._tracker.log({"mean_tokens_per_call": tokens_per_call, "expected_acceptance": acceptance}, step)
        if best_of(self._validations) is seen:
            self._best = _named("best", self._student.weights)

    def _roll_back(self, step: int, reason: str) -> None:
        rollback = Rollback(step, self._good.step, self._rate_factor / 2, reason)
        self._rollbacks.append(rollback)
        if len(self._rollbacks) > _MOST_ROLLBACKS:
            raise self._hopeless()
        _log.warning(
            "The loss of step %d was %s: back to the weights of step %d, learning rate times %g from here on.",
            step,
            reason,
            rollback.to_step,
            rollback.rate_factor,
        )
        self._restore(self._good)
        self._watch.look_again()

    def _hopeless(self) -> NonFiniteError:
        last = self._rollbacks[-1]
        what = "no finite loss" if last.reason == "not finite" else "a loss that is too high"
        return NonFiniteError(
            f"Training gave {what} in {len(self._rollbacks)} steps, the last one step {last.step}, although the "
            f"learning rate was halved each time from {self._schedule.settings.learning_rate:g}. Lower learning_rate, "
            "or collect the trace again."
        )

    def _say_what_is_kept(self) -> None:
        if not self._validations:
            return
        best, last = best_of(self._validations), self._validations[-1]
        if best.step == 0:
            _log.warning(
                "Training did not make the draft better: %.3f tokens per call on held-out prompts before it, %.3f at "
                "most after it. The draft is kept as it was.",
                best.mean_tokens_per_call,
                max((seen.mean_tokens_per_call for seen in self._validations[1:]), default=0.0),
            )
        elif best is not last:
            _log.info(
                "Kept the weights of step %d, %.3f tokens per call on held-out prompts; those of step %d give %.3f.",
                best.step,
                best.mean_tokens_per_call,
                last.step,
                last.mean_tokens_per_call,
            )

    @property
    def _rate_factor(self) -> float:
        return self._rollbacks[-1].rate_factor if self._rollbacks else 1.0

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._clock

    def _end_of(self, steps: int) -> int:
        return self._plan[steps - 1].end if steps else 0

    def _is_time_for_a_point(self, positions: int) -> bool:
        # Behind a suspicious loss no point is taken, so that the next chance comes with the next step.
        is_far = positions - self._end_of(self._good.step) >= _POSITIONS_BETWEEN_POINTS
        return is_far and not self._watch.is_suspicious

    def _begins_a_phase(self, step: int) -> bool:
        loss, num_steps = self._schedule.loss, len(self._plan)
        return step > 0 and loss(step / num_steps) is not loss((step - 1) / num_steps)

    def _point(self, step: int) -> ResumePoint:
        tensors = _named("weight", self._student.weights) | self._best | self._updater.state()
        return ResumePoint(step, tensors, tuple(self._curve), tuple(self._rollbacks), tuple(self._validations))

    def _take_up(self, start: ResumePoint) -> None:
        """Go on from a point."""
        self._good = start
        self._curve, self._rollbacks = list(start.curve), list(start.rollbacks)
        self._validations = list(start.validations)
        self._restore(start)
        weights = self._student.weights
        self._best = {
            f"best.{name}": like(start.tensors[f"best.{name}"], weight)
            for name, weight in weights.items()
            if f"best.{name}" in start.tensors
        }
        self._watch_again(start)

    def _watch_again(self, start: ResumePoint) -> None:
        """Bring the watch to where it was."""
        failed, losses = {rollback.step for rollback in start.rollbacks}, iter(start.curve)
        for step in range(start.step):
            if self._begins_a_phase(step):
                self._watch.start_over()
            if step in failed:
                self._watch.look_again()
            else:
                self._watch.has_diverged(next(losses).loss)

    def _restore(self, point: ResumePoint) -> None:
        for name, weight in self._student.weights.items():
            weight.data.copy_(like(point.tensors[f"weight.{name}"], weight))
        self._updater.restore(point.tensors)

    def _note(self) -> str:
        if not self._curve:
            return "no finite step yet"
        last = self._curve[-1]
        figures = [
            f"{last.positions / last.seconds:.0f} positions/s",
            f"loss {last.loss:.3f}",
            f"acceptance {last.acceptance:.3f}",
        ]
        if self._validations:
            figures.append(f"{self._validations[-1].mean_tokens_per_call:.2f} tokens per call")
        return ", ".join(figures)


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


def _plan(groups: Sequence[Group], settings: DistillStep, texts: Sequence[Group] = ()) -> list[_Step]:
    every, share = (*groups, *texts), settings.text.share if settings.text else 0.0
    steps = [
        tuple(every[index] for index in step)
        for step in plan_steps(groups, settings.tokens, settings.batch_tokens, settings.seed, texts, share)
    ]
    return [
        _Step(step, end)
        for step, end in zip(steps, accumulate(sum(map(num_positions, step)) for step in steps), strict=True)
    ]


def _start(work: Path, key: str, student: Student) -> ResumePoint:
    point = load_point(work, key) or ResumePoint(0, _named("weight", student.weights))
    if from_main(point.step) != point.step:
        raise CheckpointError(f"{work} is not the same folder for all processes: put the run where all of them see it.")
    return point


def _save(point: ResumePoint, work: Path, key: str) -> None:
    tensors = {name: whole(tensor) for name, tensor in point.tensors.items()}
    if processes().is_main:
        save_point(replace(point, tensors=tensors), work, key)


def _named(prefix: str, weights: Mapping[str, Float[Tensor, "..."]]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": weight.detach().clone() for name, weight in weights.items()}


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
