"""What training makes small: distances between the target's law and the draft's, position by position."""

from foredraft.distill.losses.divergences import forward_kl, hard_cross_entropy, jsd, reverse_kl, soft_cross_entropy
from foredraft.distill.losses.gradient import LossGradient, loss_gradient, loss_values
from foredraft.distill.losses.law import UNSAYABLE, EventLaw, Laws, Loss
from foredraft.distill.losses.rejection import (
    acceptance,
    lk_hybrid,
    neg_log_acceptance,
    total_variation,
    tvd_plus_plus,
)
from foredraft.distill.losses.terms import loss_name, read_loss, summed, takes_temperature, weighted_loss

__all__ = [
    "UNSAYABLE",
    "EventLaw",
    "Laws",
    "Loss",
    "LossGradient",
    "acceptance",
    "forward_kl",
    "hard_cross_entropy",
    "jsd",
    "lk_hybrid",
    "loss_gradient",
    "loss_name",
    "loss_values",
    "neg_log_acceptance",
    "read_loss",
    "reverse_kl",
    "soft_cross_entropy",
    "summed",
    "takes_temperature",
    "total_variation",
    "tvd_plus_plus",
    "weighted_loss",
]
