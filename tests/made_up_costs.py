"""Costs for tests that are not about time: measuring them takes most of an evaluation of tiny models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foredraft.acceptance.cost import Costs, Seconds

_TARGET_SECONDS, _DRAFT_SECONDS = 1e-3, 1e-4


@contextmanager
def costs_as_said() -> Iterator[None]:
    """A target step takes 1 ms over any number of tokens, a draft token 0.1 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.scoring.measure_costs", _costs)
        yield


def _costs(target: Any, drafters: Any, text: Any, law: Any, ks: Any, *rest: Any, **more: Any) -> Costs:
    blocks = {name: {k: _exactly(k * _DRAFT_SECONDS) for k in ks} for name in drafters}
    return Costs((_exactly(_TARGET_SECONDS),) * (max(ks) + 1), blocks)


def _exactly(seconds: float) -> Seconds:
    return Seconds(seconds, seconds, seconds)
