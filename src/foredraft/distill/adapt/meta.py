"""Meta-learning, first order: weights from which a few steps adapt to a domain that was never seen."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from foredraft.core.errors import NonFiniteError, TraceError
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.adapt.text import Text, groups_of
from foredraft.distill.data import Group, endless_steps, num_positions
from foredraft.distill.losses import Loss, weighted_loss
from foredraft.distill.optimizer import clip_gradients
from foredraft.distill.student import Figures, Student
from foredraft.models.draft import Draft
from foredraft.steps import MetaStep

_BETAS = (0.0, 0.999)  # Reptile's: moments do not carry from one domain into the next


@dataclass(frozen=True, slots=True)
class MetaPoint:
    """One outer step.

    Attributes:
        positions, seconds: Answer positions trained on, and training time, so far.
        loss, acceptance: On the domain's first batch, before its inner steps.
        adapted_loss: On its last batch, before the last inner step.
        learning_rate: The outer rate.
    """

    positions: int
    seconds: float
    loss: float
    acceptance: float
    adapted_loss: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class MetaLearned:
    """A draft to adapt from, and one entry for each outer step."""

    draft: Draft
    curve: tuple[MetaPoint, ...]


def meta_learn(draft: Draft, texts: Sequence[Text], settings: MetaStep, progress: Progress = SILENT) -> MetaLearned:
    """Return a copy of `draft` moved to where a few inner steps on any of the texts' domains lead far.

    Each outer step visits one domain, in an order drawn by the seed. With weights w and adapted weights v, Reptile
    sets w += rate * (v - w); FOMAML takes one inner step more, to u, and sets w += rate * (u - v), the gradient
    where adaptation ends. The inner optimizer is Adam without momentum, new for each visit; the rate falls linearly.

    Raises:
        TraceError: the texts are of fewer than two domains.
        ModelError: the draft has nothing to train.
        NonFiniteError: a loss was not finite.

    Source: Nichol et al. 2018 (arXiv 1803.02999), Algorithm 1 and section 5; Finn et al. 2017 (arXiv 1703.03400),
    section 5.2. One domain an outer step is their serial version.
    """
    domains = _domains(texts)
    student, loss = Student.of(draft), weighted_loss(settings.loss, 1.0)
    batches = {
        name: endless_steps(groups, settings.batch_tokens, settings.seed + 1009 * number)
        for number, (name, groups) in enumerate(domains.items())
    }
    curve: list[MetaPoint] = []
    started, positions = time.perf_counter(), 0
    with progress.task("meta-learning", float(settings.outer_steps), "domains") as task:
        for step, name in zip(range(settings.outer_steps), _visits(list(domains), settings.seed), strict=False):
            rate = settings.outer_rate * (1.0 - step / settings.outer_steps)
            figures, seen = _outer_step(student, batches[name], loss, settings, rate)
            positions += seen
            seconds, first, last = time.perf_counter() - started, figures[0], figures[-1]
            curve.append(MetaPoint(positions, seconds, first.loss, first.acceptance, last.loss, rate))
            task.advance()
            task.note(f"{name}: loss {first.loss:.3f}, adapted {last.loss:.3f}")
    return MetaLearned(Draft(student.model.to(draft.model.dtype), draft.head_token_ids), tuple(curve))


def _outer_step(
    student: Student, batches: Iterator[Sequence[Group]], loss: Loss, settings: MetaStep, rate: float
) -> tuple[list[Figures], int]:
    """Move the student's weights once; return the figures of the inner steps, and their positions."""
    start = _weights(student)
    optimizer = AdamW(student.weights.values(), settings.inner_rate, _BETAS, weight_decay=0.0, fused=True)
    figures, seen, origin = [], 0, start
    for step in range(settings.inner_steps + (settings.algorithm == "fomaml")):
        origin = _weights(student) if step == settings.inner_steps else origin
        batch = next(batches)
        figures.append(student.backward(batch, loss))
        norm = clip_gradients(student.weights.values(), settings.clip)
        if not math.isfinite(norm):
            raise NonFiniteError("Meta-learning met a gradient that is not finite: lower inner_rate.")
        optimizer.step()
        seen += sum(map(num_positions, batch))
    with torch.no_grad():
        for name, weight in student.weights.items():
            weight.copy_(start[name] + rate * (weight - origin[name]))
    return figures, seen


def _domains(texts: Sequence[Text]) -> dict[str, list[Group]]:
    domains: dict[str, list[Group]] = {}
    for group in groups_of(texts):
        domains.setdefault(group[0].row.domain, []).append(group)
    if len(domains) < 2:
        raise TraceError(
            f"Meta-learning is over domains, and the answers are of {len(domains)}: "
            f"{', '.join(domains) or 'none'}. Give prompts a domain each, of two at least."
        )
    return dict(sorted(domains.items()))


def _visits(names: Sequence[str], seed: int) -> Iterator[str]:
    """Yield the domains in permutations, one after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(names), generator=generator).tolist():
            yield names[index]


def _weights(student: Student) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in student.weights.items()}
