"""Adaptation: a few passes over a buffer at a low rate, bounded in time and in steps.

It keeps nothing on the way: a run that was killed leaves nothing behind, and starts again.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from foredraft.core.progress import SILENT, Progress
from foredraft.distill.adapt.objective import Objective
from foredraft.distill.adapt.text import Text, groups_of
from foredraft.distill.data import Group, endless_steps, num_positions, plan_steps
from foredraft.distill.losses import Loss
from foredraft.distill.optimizer import Updater, clip_gradients
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Figures, Student
from foredraft.models.draft import Draft
from foredraft.steps import AdaptStep, DistillStep

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdaptPoint:
    """One optimizer step.

    Attributes:
        positions: Answer positions of the buffer trained on so far, this step's included.
        seconds: Training time so far.
        loss, acceptance: Means over the step's positions of the buffer, before its update; acceptance is that of
            sum min(target, draft) over events.
        task_loss, task_acceptance: The same of the old answers, under the old loss; 0 where there are none.
        learning_rate: Of this step.
    """

    positions: int
    seconds: float
    loss: float
    acceptance: float
    task_loss: float
    task_acceptance: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Adapted:
    """A draft that learned on, and one entry for each optimizer step."""

    draft: Draft
    curve: tuple[AdaptPoint, ...]


def adapt(
    draft: Draft,
    new: Sequence[Text],
    old: Sequence[Text],
    settings: AdaptStep,
    task_loss: Loss,
    progress: Progress = SILENT,
) -> Adapted:
    """Return a copy of `draft` that has replayed `new`, rehearsing `old` against forgetting.

    The learning rate falls over the steps, or over the minutes where these are short: a run that ends by the clock
    ends at a low rate too, and only such a run is not repeated bit for bit. At the first step that is not finite it
    ends with the weights of before.

    Args:
        new: Answers of the buffer.
        old: Answers of the domains that the draft was trained on; none to let it forget.
        task_loss: What is made small on `old`.

    Raises:
        ModelError: the draft has nothing to train.
    """
    schedule = Schedule.of(
        DistillStep(loss=settings.loss, learning_rate=settings.learning_rate, warmup=settings.warmup)
    )
    objective = Objective(schedule.loss(0.0), task_loss, settings.lambda_distill, settings.lambda_task)
    loop = _Loop(Student.of(draft), objective, schedule, settings)
    curve = loop.run(_plan(groups_of(new), settings), _rehearsal(groups_of(old), settings), progress)
    return Adapted(Draft(loop.student.model.to(draft.model.dtype), draft.head_token_ids), tuple(curve))


class _Loop:
    """The optimizer and the clock."""

    def __init__(self, student: Student, objective: Objective, schedule: Schedule, settings: AdaptStep) -> None:
        self.student = student
        self._objective = objective
        self._settings = settings
        self._schedule = schedule
        self._updater = Updater("adamw", student.weights, weight_decay=0.0)

    def run(
        self, plan: Sequence[Sequence[Group]], rehearsal: Iterator[Sequence[Group]], progress: Progress
    ) -> list[AdaptPoint]:
        curve: list[AdaptPoint] = []
        started, positions = time.perf_counter(), 0
        sizes = [sum(map(num_positions, groups)) for groups in plan]
        with progress.task("adapting", float(sum(sizes)), "positions") as task:
            for step, (groups, old) in enumerate(zip(plan, rehearsal, strict=False)):
                clock = (time.perf_counter() - started) / (60.0 * self._settings.minutes)
                if clock >= 1.0:
                    break
                rate = self._schedule.learning_rate(max(step / len(plan), clock), 1.0 / len(plan))
                figures, before = self._objective.backward(self.student, groups, old)
                if not self._update(figures, before, rate):
                    _log.warning("Step %d of the adaptation was not finite: it ends with the weights of before.", step)
                    break
                positions += sizes[step]
                seconds = time.perf_counter() - started
                curve.append(
                    AdaptPoint(
                        positions, seconds, figures.loss, figures.acceptance, before.loss, before.acceptance, rate
                    )
                )
                task.advance(float(sizes[step]))
                task.note(f"loss {figures.loss:.3f}, acceptance {figures.acceptance:.3f}")
        return curve

    def _update(self, figures: Figures, before: Figures, rate: float) -> bool:
        norm = clip_gradients(self.student.weights.values(), self._settings.clip)
        if not all(map(math.isfinite, (figures.loss, before.loss, norm))):
            return False
        self._updater.step(rate)
        return True


def _plan(groups: Sequence[Group], settings: AdaptStep) -> list[list[Group]]:
    tokens = max(1, round(settings.passes * sum(map(num_positions, groups))))
    steps = plan_steps(groups, tokens, settings.batch_tokens, settings.seed)
    return [[groups[index] for index in step] for step in steps[: settings.steps or len(steps)]]


def _rehearsal(groups: Sequence[Group], settings: AdaptStep) -> Iterator[Sequence[Group]]:
    """Return the old answers of each step without end; none at all where there are none."""
    return endless_steps(groups, settings.task_tokens, settings.seed) if groups else repeat(())
