"""What changes in the course of a training: the loss and the learning rate."""

import logging
import math
from dataclasses import dataclass
from itertools import accumulate

from foredraft.distill.losses import Loss, summed, takes_temperature, weighted_loss
from foredraft.steps import DistillStep, PhaseSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the training: where it starts and how long the loss before it fades, as shares of the steps."""

    start: float
    fade: float
    loss: Loss


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of it by the share of the steps that are done, in [0, 1).

    Attributes:
        settings: Rates and shares.
        phases: In order; the first starts at 0.
    """

    settings: DistillStep
    phases: tuple[Phase, ...]

    @staticmethod
    def of(settings: DistillStep) -> "Schedule":
        """Read what the settings say of losses.

        Raises:
            UnknownNameError: a loss that the catalog does not know.
            UserError: a loss does not take such an option.
        """
        if settings.temperature != 1.0 and not any(map(takes_temperature, settings.losses)):
            _log.warning("temperature %g has no effect: no loss of this training softens laws.", settings.temperature)
        parts = _parts(settings)
        starts = accumulate((part.share for part in parts[:-1]), initial=0.0)
        return Schedule(
            settings,
            tuple(
                Phase(start, part.fade, weighted_loss(part.loss, settings.temperature))
                for start, part in zip(starts, parts, strict=True)
            ),
        )

    @property
    def main(self) -> Loss:
        """The loss of the first phase."""
        return self.phases[0].loss

    @property
    def finish(self) -> Loss:
        """The loss of the last phase."""
        return self.phases[-1].loss

    def loss(self, share: float) -> Loss:
        """Return the loss of a step: its phase's, or while that fades in a linear mixture with the one before."""
        index = max(index for index, phase in enumerate(self.phases) if phase.start <= share)
        phase = self.phases[index]
        if share - phase.start >= phase.fade:
            return phase.loss
        here = (share - phase.start) / phase.fade
        return summed([(1.0 - here, self.phases[index - 1].loss), (here, phase.loss)])

    def learning_rate(self, share: float, first: float) -> float:
        """Rise linearly over the warm-up from its `first` share, then fall as a cosine towards 0."""
        warmup = max(self.settings.warmup, first)
        if share < warmup:
            return self.settings.learning_rate * (share + first) / warmup
        return self.settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (share - warmup) / (1.0 - warmup)))


def _parts(settings: DistillStep) -> list[PhaseSettings]:
    """Return the phases; `loss` and `finish` are the simple form of two of them."""
    if settings.phases:
        return settings.phases
    if not settings.finish or settings.finish_fraction == 0.0:
        return [PhaseSettings(share=1.0, loss=settings.loss)]
    finish = PhaseSettings(share=settings.finish_fraction, loss={settings.finish: 1.0})
    if settings.finish_fraction == 1.0:
        return [finish]
    return [PhaseSettings(share=1.0 - settings.finish_fraction, loss=settings.loss), finish]
