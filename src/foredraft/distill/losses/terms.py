"""Sums of losses by name, as a recipe writes them: `forward_kl`, `jsd:beta=0.3`."""

from collections.abc import Iterable, Mapping
from functools import partial
from inspect import signature

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.catalog import resolve
from foredraft.core.options import read_options
from foredraft.distill.losses.law import EventLaw, Loss


def weighted_loss(weights: Mapping[str, float], temperature: float = 1.0) -> Loss:
    """Return the weighted sum of losses by their specs; those that take a temperature and name none get this one.

    Raises:
        UnknownNameError: a loss that the catalog does not know.
        UserError: it does not take such an option, or not such a value.
    """
    return summed([(weight, read_loss(spec, temperature)) for spec, weight in weights.items()])


def summed(terms: Iterable[tuple[float, Loss]]) -> Loss:
    """Return the sum of losses, each times its weight."""
    fixed = tuple(terms)
    if len(fixed) == 1 and fixed[0][0] == 1.0:
        return fixed[0][1]

    def total(law: EventLaw, draft_logprobs: Float[Tensor, "positions events"]) -> Float[Tensor, " positions"]:
        return torch.stack([weight * loss(law, draft_logprobs) for weight, loss in fixed]).sum(0)

    return total


def read_loss(spec: str, temperature: float = 1.0) -> Loss:
    """Return the loss that `name:option=value,...` stands for.

    Raises:
        UnknownNameError: no such loss.
        UserError: it does not take such an option, or not such a value.
    """
    name = loss_name(spec)
    loss, options = resolve("losses", name), _options(spec)
    if takes_temperature(name):
        options = {"temperature": temperature, **options}
    if options:
        loss = partial(loss, **options)
    law = EventLaw.full(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    loss(law, law.probs.clamp(min=1e-30).log())  # a value that the loss refuses is refused before anything is run
    return loss


def takes_temperature(spec: str) -> bool:
    """Return whether a loss softens laws by the training's temperature: it takes one, and its spec gives none."""
    return "temperature" in _parameters(loss_name(spec)) and "temperature" not in _options(spec)


def loss_name(spec: str) -> str:
    """Return the catalog's name of a loss."""
    return spec.partition(":")[0]


def _options(spec: str) -> dict[str, float]:
    return read_options(spec, dict.fromkeys(_parameters(loss_name(spec)), float))


def _parameters(name: str) -> list[str]:
    return list(signature(resolve("losses", name)).parameters)[2:]
