"""Several processes at one run, as `accelerate launch` and `torchrun` start them: one leads, the others help it train.

The main process makes everything and alone writes and prints. Whenever it trains a draft it hands the job to the
others, which wait for nothing else, and all of them train together.
"""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foredraft.core.errors import UserError

# Helpers wait for their next job while the main process collects answers, which takes hours. In milliseconds it must
# stay below 2^31.
_LONGEST_WAIT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of one run, seen from one of them.

    Attributes:
        rank: This one's number, from 0; 0 is the main process.
        count: How many there are.
        sharded: Whether each holds a part of the weights (FSDP2), and not all of them (DDP).
    """

    rank: int = 0
    count: int = 1
    sharded: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join_processes() -> Processes:
    """Meet the other processes that the launcher started, if any; return this one's place among them.

    Raises:
        UserError: the launcher asks for FSDP's first version.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if _flag("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") == "1":
            raise UserError("Weights are sharded by FSDP2 only: add --fsdp_version 2 to accelerate launch.")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=_LONGEST_WAIT)
        atexit.register(dist.destroy_process_group)
        dist.barrier()  # Connections are made while all are known to be there.
    return processes()


def processes() -> Processes:
    """Return the processes that have met; one alone where none has."""
    if not dist.is_initialized():
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size(), _flag("ACCELERATE_USE_FSDP"))


def from_main(value: Any) -> Any:
    """Return the main process's `value` in every process; waits until all ask for it.

    Raises:
        SystemExit: the main process ended without sending one; it says why itself.
    """
    if processes().count == 1:
        return value
    box = [value]
    try:
        dist.broadcast_object_list(box, src=0)
    except RuntimeError as error:
        if processes().is_main:
            raise
        raise SystemExit(f"Process {processes().rank} lost the main process: {error}") from error
    return box[0]


def summed(*values: float) -> list[float]:
    """Return the sum of each value over all processes, in double precision."""
    if processes().count == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
