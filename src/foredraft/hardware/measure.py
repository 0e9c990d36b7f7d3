"""This machine's own profile: streaming, products and the fixed cost of layers, timed in torch with its threads."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.hardware.profile import HardwareProfile
from foredraft.models.kv_cache import KeyValueCache

_STREAMED = 1 << 28  # bytes; more than any cache holds
_WIDTH = 1024
_ROWS = 16  # a product as wide as those of a verified block
_FEW, _MANY = 4, 20
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class _Fixed:
    per_pass: float
    per_layer: float


def measure_profile(name: str = "", watts: float = 65.0, repeats: int = 15) -> HardwareProfile:
    """Return what this processor sustains with torch's current number of threads.

    Bandwidth is that of a matrix times one vector, FLOP/s those of 16 rows times a matrix in cache, fixed costs those
    of a model too small to compute anything. The same matrix times 2 and 16 rows says what reading weights costs where
    the library copies them first, and how much of computing hides behind it. All are medians, so that efficiencies
    are 1.

    Args:
        name: What the profile is called; the processor and its threads if left out.
        watts: Power while it decodes; torch cannot tell.
        repeats: Timings behind each figure.
    """
    threads = torch.get_num_threads()
    fixed, streamed = _fixed_costs(repeats), _streamed(repeats)
    flops = {_name(dtype): _flops(dtype, repeats) for dtype in (torch.float32, torch.bfloat16)}
    computing = {rows: 2 * rows * _STREAMED / 4 / flops["float32"] for rows in (2, _ROWS)}
    reading = max(streamed[2] - computing[2], streamed[1])
    hidden = 1.0 - (streamed[_ROWS] - reading) / computing[_ROWS]
    how = f"measured, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    return HardwareProfile(
        name=name or f"{platform.processor() or platform.machine()}, {threads} threads",
        memory_bandwidth=_STREAMED / streamed[1],
        batch_bandwidth=_STREAMED / reading,
        overlap=min(max(hidden, 0.0), 1.0),
        flops=flops,
        memory=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        watts=watts,
        pass_seconds=fixed.per_pass,
        layer_seconds=fixed.per_layer,
        sources={
            "memory_bandwidth": f"{how}: a matrix of {_STREAMED >> 20} MiB times a vector",
            "batch_bandwidth": f"{how}: the same matrix times 2 rows, less computing",
            "overlap": f"{how}: the same matrix times {_ROWS} rows",
            "flops": f"{how}: {_ROWS} rows times a matrix of {_WIDTH} x {_WIDTH}",
            "memory": "the operating system",
            "watts": "assumed",
            "pass_seconds": f"{how}: a model of {_FEW} tiny layers, less the layers",
            "layer_seconds": f"{how}: models of {_FEW} and {_MANY} tiny layers",
        },
    )


@torch.no_grad()
def _streamed(repeats: int) -> dict[int, float]:
    """Return the seconds of a matrix that no cache holds times 1, 2 and 16 rows."""
    matrix = torch.ones(_STREAMED // 4 // _WIDTH, _WIDTH)
    clocks = {rows: partial(torch.nn.functional.linear, torch.ones(rows, _WIDTH), matrix) for rows in (1, 2, _ROWS)}
    return _median(clocks, repeats)


@torch.no_grad()
def _flops(dtype: torch.dtype, repeats: int) -> float:
    matrix, rows = torch.ones(_WIDTH, _WIDTH, dtype=dtype), torch.ones(_ROWS, _WIDTH, dtype=dtype)
    return 2 * _ROWS * _WIDTH**2 / _median({0: partial(torch.nn.functional.linear, rows, matrix)}, repeats)[0]


def _fixed_costs(repeats: int) -> _Fixed:
    """Return what passes and layers cost that compute next to nothing: the calls themselves."""
    seconds = _median({layers: _tiny_pass(layers) for layers in (_FEW, _MANY)}, repeats)
    few, many = seconds[_FEW], seconds[_MANY]
    per_layer = max(0.0, (many - few) / (_MANY - _FEW))
    return _Fixed(max(0.0, few - _FEW * per_layer), per_layer)


def _tiny_pass(layers: int) -> Callable[[], object]:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_TINY)).eval()
    cache, context, token = KeyValueCache(model), torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 1).long()

    @torch.no_grad()
    def read(token_ids: torch.Tensor, length: int) -> object:
        cache.crop(length)
        return model.base_model(input_ids=token_ids, cache=cache.inner, use_cache=True)

    read(context, 0)
    return lambda: read(token, 16)


def _median(clocks: Mapping[int, Callable[[], object]], repeats: int) -> dict[int, float]:
    """Return the median seconds of each call, taken in turns after a warm-up."""
    timings: dict[int, list[float]] = {key: [] for key in clocks}
    for _ in range(repeats + _WARM_UP):
        for key, run in clocks.items():
            began = time.perf_counter()
            run()
            timings[key].append(time.perf_counter() - began)
    return {key: float(np.median(values[_WARM_UP:])) for key, values in timings.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
