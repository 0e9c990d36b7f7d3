"""Training on several processes: each takes its share of a step's groups, and all end with the same gradient.

Weights are either held whole by every process, their gradients summed by torch's DistributedDataParallel, or sharded
layer by layer by FSDP2. Both divide what they sum by the number of processes; a step multiplies it back, so that its
gradient is that of the mean over all positions, whoever read them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from foredraft.core.processes import Processes
from foredraft.distill.data import Group, num_positions
from foredraft.models.layers import layer_stack


@dataclass(frozen=True, slots=True)
class Part:
    """Groups of one pass.

    Attributes:
        groups: Never empty.
        counts: False for a pass that is only made because other processes make one.
        is_last: Of this process's passes of the step.
    """

    groups: Sequence[Group]
    counts: bool
    is_last: bool


@final
class Spread:
    """A model's body on the processes of a run.

    Attributes:
        processes: Who they are.
        body: Runs the body; what the model's own `base_model` would give.
    """

    def __init__(self, model: PreTrainedModel, outside: Iterable[nn.Parameter], processes: Processes) -> None:
        """Spread `model` in place.

        Args:
            model: All processes hold the same; what learns has requires_grad.
            outside: Weights that every process holds whole, sharded or not: embeddings and head.
        """
        self.processes = processes
        self.body: Callable[..., Any] = model.base_model
        outside = list(outside)
        if processes.count > 1 and processes.sharded:
            _shard(model, set(outside), processes)
        elif processes.count > 1:
            asking = [weight for weight in outside if weight.requires_grad]
            for weight in asking:
                weight.requires_grad_(False)
            self.body = DistributedDataParallel(model.base_model)
            for weight in asking:
                weight.requires_grad_()

    @property
    def factor(self) -> float:
        """What a gradient is multiplied by, since summing divides by the number of processes."""
        return float(self.processes.count)

    def parts(self, groups: Sequence[Group], cut: Callable[[Sequence[Group]], list[list[Group]]]) -> list[Part]:
        """Return this process's passes over its share of a step's groups; all processes make equally many.

        Args:
            cut: Cuts groups into passes.
        """
        shares = [cut(share) for share in _shares(groups, self.processes.count)]
        passes = max(map(len, shares))
        mine = shares[self.processes.rank]
        idle = [[min(groups, key=num_positions)]] * (passes - len(mine))
        return [Part(some, number < len(mine), number + 1 == passes) for number, some in enumerate([*mine, *idle])]

    def during(self, part: Part) -> AbstractContextManager[None]:
        """Return the context of one pass and its gradient: what is summed is summed once, behind the last pass."""
        if isinstance(self.body, DistributedDataParallel) and not part.is_last:
            return self.body.no_sync()
        return nullcontext()

    def average(self, weights: Iterable[nn.Parameter]) -> None:
        """Average the gradients of weights that lie outside the body."""
        for weight in weights if self.processes.count > 1 else ():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
            weight.grad /= self.processes.count


def whole(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return a tensor that processes may hold in shards as one; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(stored: Tensor, weight: Float[Tensor, "..."]) -> Tensor:
    """Return a copy of `stored` where `weight` lies, and sharded as it is if it has its shape."""
    if isinstance(weight, DTensor) and not isinstance(stored, DTensor) and stored.shape == weight.shape:
        return distribute_tensor(stored.to(weight.device), weight.device_mesh, weight.placements)
    return stored.to(weight.device, copy=True)


def _shard(model: PreTrainedModel, outside: set[nn.Parameter], processes: Processes) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    mesh = init_device_mesh(model.device.type, (processes.count,))
    for layer in layer_stack(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model.base_model, mesh=mesh, ignored_params=outside)
    # transformers finds what a body can return by the name of its class, and sharding gives it another class.
    _CAN_RECORD_REGISTRY[model.base_model] = model.base_model._can_record_outputs


def _shares(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Deal groups out, the largest first, each to whom has the fewest positions; in their order within a share."""
    if count == 1:
        return [list(groups)]
    owner, filled = [0] * len(groups), [0] * count
    for index in sorted(range(len(groups)), key=lambda index: -num_positions(groups[index])):
        owner[index] = min(range(count), key=lambda process: filled[process])
        filled[owner[index]] += num_positions(groups[index])
    return [[group for group, owned in zip(groups, owner, strict=True) if owned == process] for process in range(count)]
