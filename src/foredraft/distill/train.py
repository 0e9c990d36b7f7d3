"""Distillation: teach a draft the target's law on answers that the target wrote.

The draft is the student, the target the teacher. Only the body and the final norm learn; embeddings and head stay
the target's, so that a trimmed head remains a slice of them.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import final

from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from foredraft.core.digest import digest_of
from foredraft.core.errors import NonFiniteError
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.data import Group, num_positions, plan_steps, read_groups
from foredraft.distill.emphasis import Emphasis
from foredraft.distill.limits import require_laws
from foredraft.distill.matching import Matching
from foredraft.distill.resume import CurvePoint, ResumePoint, Rollback, load_point, save_point
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Student
from foredraft.models.draft import Draft
from foredraft.models.loading import model_fingerprint
from foredraft.models.target import LocalTarget
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace, require_same

_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_STATE = ("step", "exp_avg", "exp_avg_sq")
_POSITIONS_BETWEEN_POINTS = 4096
_MOST_ROLLBACKS = 10


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a training gave.

    Attributes:
        draft: The trained draft, in the dtype it came in.
        curve: One entry for each optimizer step that counted.
        rollbacks: Steps that were not finite and were taken back.
    """

    draft: Draft
    curve: tuple[CurvePoint, ...]
    rollbacks: tuple[Rollback, ...]

    @property
    def training_tokens(self) -> int:
        """Answer positions trained on, repeats included."""
        return self.curve[-1].positions


def distill(
    draft: Draft,
    traces: Sequence[Trace],
    settings: DistillStep,
    target: LocalTarget,
    work: Path,
    progress: Progress = SILENT,
) -> Distilled:
    """Return a trained copy of `draft`, which is left as it was.

    Killed at any moment and called again with the same arguments, it goes on from the last point in
    `work` and gives the same weights, bit for bit, on the same machine and number of threads.

    Args:
        draft: Any decoder that transformers runs with a replaceable attention; trained in float32.
        traces: Answers of the target, under one or several laws.
        settings: Losses, lengths and rates; see DistillStep.
        target: Who wrote the traces. Run only where layers are matched.
        work: Folder for points to resume from; `forget_points` removes it once the draft is saved.
        progress: Counts answer positions.

    Raises:
        TraceError: a trace of another target or tokenizer, or without answers.
        UnknownNameError: a loss that the catalog does not know.
        ModelError: the draft has nothing to train, or cannot be run on packed text.
        NonFiniteError: the loss stayed NaN or infinite after many rollbacks.
        CheckpointError: `work` holds the points of another training.
    """
    for trace in traces:
        require_same(
            trace,
            target.name,
            target_fingerprint=target.fingerprint,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
        )
    require_laws(settings.losses, traces)
    schedule = Schedule.of(settings)
    student = Student.of(draft)
    matching = Matching.of(target.model, student.model, settings)
    student.adopt(matching.weights)
    emphasis = Emphasis.of(settings, draft)
    groups = read_groups(traces)
    key = _key(draft, traces, settings)
    start = load_point(work, key) or ResumePoint(0, _weights(student))
    training = _Training(
        student, schedule, matching, emphasis, _plan(groups, settings), _optimizer(student, settings), start
    )
    point = training.run(lambda point: save_point(point, work, key), progress)
    trained = Draft(student.model.to(draft.model.dtype), draft.head_token_ids)
    return Distilled(trained, point.curve, point.rollbacks)


@dataclass(frozen=True, slots=True)
class _Step:
    """The groups of one optimizer step, and the answer positions trained on when it is done."""

    groups: tuple[Group, ...]
    end: int


@final
class _Training:
    """The loop: a plan of steps, an optimizer, and the last good point to fall back to."""

    def __init__(
        self,
        student: Student,
        schedule: Schedule,
        matching: Matching,
        emphasis: Emphasis | None,
        plan: Sequence[_Step],
        optimizer: AdamW,
        start: ResumePoint,
    ) -> None:
        self._student = student
        self._schedule = schedule
        self._matching = matching
        self._emphasis = emphasis
        self._plan = plan
        self._optimizer = optimizer
        self._good = start
        self._curve = list(start.curve)
        self._rollbacks = list(start.rollbacks)

    def run(self, save: Callable[[ResumePoint], None], progress: Progress) -> ResumePoint:
        """Do the steps that are left; return the last point, saved."""
        self._restore(self._good)
        first = self._good.step
        done = self._plan[first - 1].end if first else 0
        seconds, started = self._curve[-1].seconds if self._curve else 0.0, time.perf_counter()
        saved = started
        with progress.task("distilling", float(self._plan[-1].end), "positions", float(done)) as task:
            for step in range(first, len(self._plan)):
                self._step(step, seconds - started)
                end, last = self._plan[step].end, step + 1 == len(self._plan)
                task.advance(float(end - done))
                task.note(self._note())
                if last or end // _POSITIONS_BETWEEN_POINTS > done // _POSITIONS_BETWEEN_POINTS:
                    self._good = self._point(step + 1)
                    if last or time.perf_counter() - saved >= self._schedule.settings.checkpoint_every:
                        save(self._good)
                        saved = time.perf_counter()
                done = end
        if not self._curve:
            raise self._hopeless()
        return self._good

    def _step(self, step: int, clock: float) -> None:
        share = step / len(self._plan)
        figures = self._student.backward(
            self._plan[step].groups, self._schedule.loss(share), self._matching.at(share), 1.0, self._emphasis
        )
        norm = clip_grad_norm_(self._student.weights.values(), self._schedule.settings.clip)
        if not (math.isfinite(figures.loss) and math.isfinite(float(norm))):
            self._roll_back(step)
            return
        rate = self._schedule.learning_rate(share, 1 / len(self._plan)) * self._rate_factor
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        seconds = clock + time.perf_counter()
        self._curve.append(CurvePoint(self._plan[step].end, seconds, figures.loss, figures.acceptance, rate))

    def _roll_back(self, step: int) -> None:
        rollback = Rollback(step, self._good.step, self._rate_factor / 2)
        self._rollbacks.append(rollback)
        if len(self._rollbacks) > _MOST_ROLLBACKS:
            raise self._hopeless()
        _log.warning(
            "The loss of step %d was not finite: back to the weights of step %d, learning rate times %g from here on.",
            step,
            rollback.to_step,
            rollback.rate_factor,
        )
        self._restore(self._good)

    def _hopeless(self) -> NonFiniteError:
        return NonFiniteError(
            f"Training gave no finite loss in {len(self._rollbacks)} steps, the last one step "
            f"{self._rollbacks[-1].step}, although the learning rate was halved each time from "
            f"{self._schedule.settings.learning_rate:g}. Lower learning_rate, or collect the trace again."
        )

    @property
    def _rate_factor(self) -> float:
        return self._rollbacks[-1].rate_factor if self._rollbacks else 1.0

    def _point(self, step: int) -> ResumePoint:
        state = {
            f"{key}.{name}": value.clone()
            for name, weight in self._student.weights.items()
            for key, value in self._optimizer.state[weight].items()
        }
        return ResumePoint(step, _weights(self._student) | state, tuple(self._curve), tuple(self._rollbacks))

    def _restore(self, point: ResumePoint) -> None:
        for name, weight in self._student.weights.items():
            weight.data.copy_(point.tensors[f"weight.{name}"])
            stored = {key: point.tensors[f"{key}.{name}"] for key in _STATE if f"{key}.{name}" in point.tensors}
            self._optimizer.state[weight] = {key: value.to(weight.device, copy=True) for key, value in stored.items()}

    def _note(self) -> str:
        if not self._curve:
            return "no finite step yet"
        last = self._curve[-1]
        return (
            f"loss {last.loss:.3f}, acceptance {last.acceptance:.3f}, {last.positions / last.seconds:.0f} positions/s"
        )


def _plan(groups: Sequence[Group], settings: DistillStep) -> list[_Step]:
    steps = [
        tuple(groups[index] for index in step)
        for step in plan_steps(groups, settings.tokens, settings.batch_tokens, settings.seed)
    ]
    return [
        _Step(step, end)
        for step, end in zip(steps, accumulate(sum(map(num_positions, step)) for step in steps), strict=True)
    ]


def _optimizer(student: Student, settings: DistillStep) -> AdamW:
    return AdamW(
        student.weights.values(), settings.learning_rate, _BETAS, weight_decay=settings.weight_decay, fused=True
    )


def _weights(student: Student) -> dict[str, Tensor]:
    return {f"weight.{name}": weight.detach().clone() for name, weight in student.weights.items()}


def _key(draft: Draft, traces: Sequence[Trace], settings: DistillStep) -> str:
    return digest_of(
        [
            settings.model_dump(exclude={"checkpoint_every"}),
            [trace.digest for trace in traces],
            model_fingerprint(draft.model),
            draft.head_token_ids.tolist(),
        ]
    )
