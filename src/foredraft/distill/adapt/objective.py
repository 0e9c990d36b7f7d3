"""The incremental objective: what the target says now, and what the draft was taught before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.distill.data import Group
from foredraft.distill.losses import Loss
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Figures, Student
from foredraft.steps import DistillStep

_NOTHING = Figures(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Objective:
    """lambda_distill * E[distill loss on new answers] + lambda_task * E[task loss on old answers].

    Both are means over answer positions. The distill loss is KL(target || draft) unless another is asked for; the
    task loss is the draft's own of before (see original_loss), on answers of the domains that it was trained on.

    Attributes:
        distill, task: The two losses.
        lambda_distill, lambda_task: Their weights.
    """

    distill: Loss
    task: Loss
    lambda_distill: float
    lambda_task: float

    def backward(self, student: Student, new: Sequence[Group], old: Sequence[Group]) -> tuple[Figures, Figures]:
        """Set the gradient of the objective over one step's answers; return the figures of new and old.

        Without old answers, or with lambda_task 0, it is plain distillation on the new ones.
        """
        figures = student.backward(new, self.distill)
        _scale(student, self.lambda_distill)
        if not old or self.lambda_task == 0.0:
            return figures, _NOTHING
        held = {name: weight.grad for name, weight in student.weights.items()}
        before = student.backward(old, self.task)
        _scale(student, self.lambda_task)
        for name, weight in student.weights.items():
            gradient = held[name]
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return figures, before


def original_loss(steps: Sequence[Mapping[str, Any]]) -> tuple[str, Loss]:
    """Return the loss, and its name, that the last distillation of a draft ended with; forward_kl if it had none.

    Args:
        steps: Those of the draft's manifest.
    """
    stored = [step["distill"] for step in steps if "distill" in step]
    settings = DistillStep.model_validate(stored[-1]) if stored else DistillStep()
    name = " + ".join(loss if weight == 1.0 else f"{weight:g} {loss}" for loss, weight in settings.last_loss.items())
    return name, Schedule.of(settings).phases[-1].loss


def _scale(student: Student, factor: float) -> None:
    if factor != 1.0:
        for weight in student.weights.values():
            if weight.grad is not None:
                weight.grad.mul_(factor)
