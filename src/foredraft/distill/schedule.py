"""What changes in the course of a training: the loss, the learning rate and the weight of layer matching."""

import logging
import math
from dataclasses import dataclass

from foredraft.distill.losses import Loss, takes_temperature, weighted_loss
from foredraft.steps import DistillStep

_log = logging.getLogger(__name__)

_MATCHING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of it by the share of the steps that are done, in [0, 1).

    Attributes:
        settings: Rates, weights and shares.
        main, finish: The loss of the first steps, and of the last `settings.finish_fraction` of them.
    """

    settings: DistillStep
    main: Loss
    finish: Loss

    @staticmethod
    def of(settings: DistillStep) -> "Schedule":
        finish = {settings.finish: 1.0} if settings.finish else settings.loss
        if settings.temperature != 1.0 and not any(map(takes_temperature, (*settings.loss, *finish))):
            _log.warning("temperature %g has no effect: no loss of this training softens laws.", settings.temperature)
        return Schedule(
            settings, weighted_loss(settings.loss, settings.temperature), weighted_loss(finish, settings.temperature)
        )

    def loss(self, share: float) -> Loss:
        return self.main if share < 1.0 - self.settings.finish_fraction else self.finish

    def learning_rate(self, share: float, first: float) -> float:
        """Rise linearly over the warm-up from its `first` share, then fall as a cosine towards 0."""
        warmup = max(self.settings.warmup, first)
        if share < warmup:
            return self.settings.learning_rate * (share + first) / warmup
        return self.settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (share - warmup) / (1.0 - warmup)))

    def matching(self, share: float) -> float:
        """Fall linearly to 0 in the first part of the training, so that the target need not run in the rest."""
        return self.settings.layer_matching * max(0.0, 1.0 - share / _MATCHING_SHARE)
