"""Distillation: teach a draft the target's law on answers that the target wrote.

The draft is the student, the target the teacher. Only the body and the final norm learn; embeddings and head stay
the target's, so that a trimmed head remains a slice of them.
"""

import copy
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.digest import digest_of
from foredraft.core.errors import ModelError, NonFiniteError
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.data import Group, Pack, num_positions, pack, plan_steps, read_groups, rows_of_tokens
from foredraft.distill.losses import Loss, loss_gradient, weighted_loss
from foredraft.distill.packed import packed_attention, run_body
from foredraft.distill.resume import CurvePoint, ResumePoint, Rollback, load_point, save_point
from foredraft.models.draft import Draft
from foredraft.models.head import Head
from foredraft.models.loading import model_fingerprint
from foredraft.recipe import DistillStep
from foredraft.trace.store import Trace, require_same

_log = logging.getLogger(__name__)

_PACK_TOKENS = 1024
_STEPS_BETWEEN_POINTS = 8
_MOST_ROLLBACKS = 10
_MATCHING_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a training gave.

    Attributes:
        draft: The trained draft, in the dtype it came in.
        curve: One entry for each optimizer step.
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
    work: Path,
    *,
    target_fingerprint: str,
    tokenizer_fingerprint: str,
    target: PreTrainedModel | None = None,
    progress: Progress = SILENT,
) -> Distilled:
    """Return a trained copy of `draft`, which is left as it was.

    Killed at any moment and called again with the same arguments, it goes on from the last point in
    `work` and gives the same weights, bit for bit, on the same machine and number of threads.

    Args:
        draft: Any decoder that transformers runs with a replaceable attention; trained in float32.
        traces: Answers of the target, under one or several laws.
        settings: Losses, lengths and rates; see DistillStep.
        work: Folder for points to resume from; it may be deleted once the draft is saved.
        target_fingerprint, tokenizer_fingerprint: Of the target that the draft is for; traces of others are refused.
        target: The target itself; needed only for layer_matching, which runs it on the same text.
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
            trace, "the draft", target_fingerprint=target_fingerprint, tokenizer_fingerprint=tokenizer_fingerprint
        )
    groups = read_groups(traces)
    student = Student.of(draft)
    key = digest_of(
        [settings.model_dump(), [trace.digest for trace in traces], model_fingerprint(draft.model), draft.head_token_ids.tolist()]
    )
    start = load_point(work, key)
    training = _Training(student, groups, settings, _matching(settings, target, student), start or _first_point(student))
    with ExitStack() as stack:
        for model in {id(model): model for model in (student.model, target) if model is not None}.values():
            stack.enter_context(packed_attention(model))
        point = training.run(lambda point: save_point(point, work, key), progress)
    trained = Draft(student.model.to(draft.model.dtype), draft.head_token_ids)
    return Distilled(trained, point.curve, point.rollbacks)


@final
class _Training:
    """The loop: a plan of steps, the optimizer, and the last point that was good."""

    def __init__(
        self,
        student: Student,
        groups: Sequence[Group],
        settings: DistillStep,
        matching: LayerMatching | None,
        start: ResumePoint,
    ) -> None:
        self._student = student
        self._groups = groups
        self._settings = settings
        self._matching = matching
        self._plan = plan_steps(groups, settings.tokens, settings.batch_tokens, settings.seed)
        self._losses = _losses(settings, len(self._plan))
        self._optimizer = AdamW(student.weights.values(), betas=_BETAS, weight_decay=settings.weight_decay, fused=True)
        self._good = start
        self._curve = list(start.curve)
        self._rollbacks = list(start.rollbacks)

    def run(self, save: Callable[[ResumePoint], None], progress: Progress) -> ResumePoint:
        """Do the steps that are left and return the last point, saved."""
        _restore(self._student, self._optimizer, self._good)
        done = self._curve[-1].positions if self._curve else 0
        total = sum(num_positions(self._groups[index]) for step in self._plan for index in step)
        saved = time.perf_counter()
        with progress.task("distilling", total, "positions", done) as task:
            for step in range(self._good.step, len(self._plan)):
                positions = self._step(step)
                task.advance(positions)
                task.note(...)
                last = step + 1 == len(self._plan)
                if last or (step + 1) % _STEPS_BETWEEN_POINTS == 0:
                    self._good = self._point(step + 1)
                    if last or time.perf_counter() - saved >= self._settings.checkpoint_every:
                        save(self._good)
                        saved = time.perf_counter()
        return self._good
