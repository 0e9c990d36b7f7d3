"""What turns gradients into steps: the optimizers by name, their state as plain tensors, and clipping."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from foredraft.core.errors import MissingExtraError, UserError
from foredraft.distill.parallel import like, whole

OptimizerName = Literal["adamw", "adamw-8bit"]

_BETAS = (0.9, 0.95)
# State that is a number and no tensor is stored as one, under its key with this mark.
_NUMBER = "#"


@final
class Updater:
    """The optimizer of some weights.

    Attributes:
        weights: What it changes, by name.
    """

    def __init__(self, name: OptimizerName, weights: Mapping[str, Float[Tensor, "..."]], weight_decay: float) -> None:
        """Make the optimizer `name`.

        adamw: Loshchilov and Hutter 2019 (arXiv 1711.05101). adamw-8bit: the same with both moments in 8 bits,
        Dettmers et al. 2022 (arXiv 2110.02861).

        Raises:
            UserError: adamw-8bit without a GPU, or over sharded weights.
            MissingExtraError: adamw-8bit without bitsandbytes.
        """
        self.weights = weights
        self._optimizer = _make(name, list(weights.values()), weight_decay)

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything the next step depends on beside weights and gradients, by name."""
        return {
            f"{key if isinstance(value, Tensor) else key + _NUMBER}.{name}": _copied(value)
            for name, weight in self.weights.items()
            for key, value in self._optimizer.state.get(weight, {}).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a state; `tensors` may hold other things under other names."""
        for name, weight in self.weights.items():
            state = {key: tensors[f"{key}.{name}"] for key in _keys(tensors, name)}
            self._optimizer.state[weight] = _restored(state, weight)


def clip_gradients(weights: Iterable[Float[Tensor, "..."]], most: float) -> float:
    """Scale all gradients so that their common norm is at most `most`; return the norm that they had."""
    weights = list(weights)
    # Gradients that are spread over processes and those that are not cannot be summed in one call.
    kinds = [
        [w for w in weights if isinstance(w, DTensor) is spread and w.grad is not None] for spread in (True, False)
    ]
    norm = math.hypot(*(float(whole(get_total_norm([w.grad for w in kind]))) for kind in kinds if kind))
    for kind in filter(None, kinds):
        clip_grads_with_norm_(kind, most, torch.tensor(norm))
    return norm


def _make(name: OptimizerName, weights: list[Tensor], weight_decay: float) -> Optimizer:
    if name == "adamw-8bit":
        return _adamw_8bit(weights, weight_decay)
    return AdamW(weights, betas=_BETAS, weight_decay=weight_decay, fused=True)


def _adamw_8bit(weights: list[Tensor], weight_decay: float) -> Optimizer:
    if any(isinstance(weight, DTensor) for weight in weights):
        raise UserError("optimizer adamw-8bit does not take sharded weights: use adamw, whose state is sharded too.")
    if weights[0].device.type != "cuda":
        raise UserError("optimizer adamw-8bit needs an NVIDIA GPU, and the draft is on the processor: use adamw.")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'optimizer adamw-8bit needs the package bitsandbytes: pip install "foredraft[quantize]".'
        ) from error
    return AdamW8bit(weights, betas=_BETAS, weight_decay=weight_decay)


def _keys(tensors: Mapping[str, Tensor], name: str) -> list[str]:
    ending = f".{name}"
    return [key.removesuffix(ending) for key in tensors if key.endswith(ending) and "." not in key.removesuffix(ending)]


def _copied(value: Any) -> Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


def _restored(state: Mapping[str, Tensor], weight: Tensor) -> dict[str, Any]:
    return {
        key.removesuffix(_NUMBER): value.item() if key.endswith(_NUMBER) else like(value, weight)
        for key, value in state.items()
        if key not in ("weight", "best")
    }
