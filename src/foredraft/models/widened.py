"""Computing with a stored model in float32, whatever its weights are stored in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def widened(model: torch.nn.Module) -> Iterator[None]:
    """Hold 16-bit weights of a model in float32 for a while; afterwards they are what they were."""
    kept = {weight: weight.data for weight in model.parameters() if weight.dtype in (torch.bfloat16, torch.float16)}
    try:
        for weight, data in kept.items():
            weight.data = data.float()
        yield
    finally:
        for weight, data in kept.items():
            weight.data = data
