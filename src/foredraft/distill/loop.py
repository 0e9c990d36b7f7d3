"""The loop of a training: steps, replays on held-out prompts, and the last good point to fall back to."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import NonFiniteError
from foredraft.core.processes import from_main
from foredraft.core.progress import Progress
from foredraft.distill.data import Group
from foredraft.distill.divergence import DivergenceWatch
from foredraft.distill.emphasis import Emphasis
from foredraft.distill.matching import Matching
from foredraft.distill.optimizer import Updater, clip_gradients
from foredraft.distill.parallel import like
from foredraft.distill.resume import CurvePoint, ResumePoint, Rollback
from foredraft.distill.rollouts import OnPolicy
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Figures, Student
from foredraft.distill.tracking import Tracker
from foredraft.distill.validation import Validated, Validation, best_of

_log = logging.getLogger(__name__)

_MOST_ROLLBACKS = 10
_POSITIONS_BETWEEN_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of one optimizer step, and the answer positions trained on when it is done."""

    groups: tuple[Group, ...]
    end: int


@final
class Training:
    """The loop: a plan of steps, an optimizer, replays on held-out prompts, and the last good point to fall back to."""

    def __init__(
        self,
        student: Student,
        schedule: Schedule,
        matching: Matching,
        emphasis: Emphasis | None,
        plan: Sequence[Step],
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
            self._best = named("best", self._student.weights)

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
        tensors = named("weight", self._student.weights) | self._best | self._updater.state()
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


def named(prefix: str, weights: Mapping[str, Float[Tensor, "..."]]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": weight.detach().clone() for name, weight in weights.items()}
