"""Keys and values of what a model has read: grown in place, cropped and thinned out without copying."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from foredraft.core.errors import CapabilityError
from foredraft.models.light.model import LightForCausalLM

_FIRST_CAPACITY = 256


@final
class KeyValueCache:
    """A transformers cache whose buffers have room to grow.

    Attributes:
        inner: What the model takes as `cache=`.
    """

    def __init__(self, model: PreTrainedModel, capacity: int = _FIRST_CAPACITY) -> None:
        """Make an empty cache with room for `capacity` tokens a row; it doubles when they are used up.

        Raises:
            CapabilityError: the model keeps a recurrent state, which cannot be cropped.
        """
        self.inner = _cache_of(model, lambda: _GrowingLayer(capacity))
        self._growing = [layer for layer in self.inner.layers if isinstance(layer, _GrowingLayer)]

    @property
    def length(self) -> int:
        """Tokens held for each row."""
        return self._growing[0].length

    def crop(self, length: int) -> None:
        """Forget what comes behind the first `length` tokens."""
        for layer in self._growing:
            layer.length = min(layer.length, length)

    def keep(self, length: int, positions: list[int]) -> None:
        """Keep the first `length` tokens and, behind them, those at `positions`, ascending; forget the others."""
        for layer in self._growing:
            layer.keep(length, positions)

    def begin_with(self, other: "KeyValueCache", padding: list[int]) -> None:
        """Let each row of this empty cache begin with what the one row of `other` holds, behind its padding.

        All rows get the same length: what does not fit behind the padding is left to be read.
        """
        for layer, source in zip(self._growing, other._growing, strict=True):
            layer.begin_with(source, padding)

    def place(self, other: "KeyValueCache", rows: list[int], num_rows: int, end: int) -> None:
        """Copy what `other` holds into `rows` of this cache of `num_rows`, so that it ends at column `end`.

        Columns before it hold zeros, which a mask must hide.
        """
        for layer, source in zip(self._growing, other._growing, strict=True):
            layer.place(source, rows, num_rows, end)

    def replace_row(self, row: int, by: int) -> None:
        """Let row `by` take the place of `row`; the next pass may then be one row shorter."""
        for layer in self._growing:
            layer.replace_row(row, by)


@final
class RaggedCache:
    """A transformers cache of several texts, each as long as it is. Every pass needs a mask and positions of its own.

    Attributes:
        inner: What the model takes as `cache=`.
        lengths: Tokens held for each row. A pass writes behind them and leaves them as they are: set them to what
            stands, less after a rejection.
    """

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int = _FIRST_CAPACITY) -> None:
        """Make empty caches with room for `capacity` tokens each; see KeyValueCache."""
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.inner = _cache_of(model, lambda: _RaggedLayer(self, capacity))
        self._layers = [layer for layer in self.inner.layers if isinstance(layer, _RaggedLayer)]

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        end = len(self.lengths) - 1
        for layer in self._layers:
            layer.replace_row(row, by=end)
        self.lengths[row] = self.lengths[end]
        self.lengths = self.lengths[:end]


def _cache_of(model: PreTrainedModel, attention_layer: Callable[[], Any]) -> Cache:
    """Return a cache with `attention_layer()` for each attention layer of a model.

    Raises:
        CapabilityError: the model keeps a recurrent state, which cannot be cropped.
    """
    if isinstance(model, LightForCausalLM):
        raise CapabilityError(
            "A light net keeps sums of what it read, which cannot be cropped: it drafts, and checks no other draft."
        )
    layers: list[Any] = []
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(attention_layer())
        elif isinstance(layer, DummyLayer):
            layers.append(layer)
        else:
            raise CapabilityError(
                f"{type(model).__name__} keeps a recurrent state ({type(layer).__name__}), which cannot be cropped "
                "after a rejected draft. Models that only have attention layers can be used."
            )
    return Cache(layers=layers)


@final
class _GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, capacity, dim]. Sliding-window layers keep all and mask."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        self.keys, self.values = torch.empty(0), torch.empty(0)
        self.is_initialized = False
        self.length = 0
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, end = key_states.shape[0], self.length + key_states.shape[2]
        if not self.is_initialized:
            self._capacity = max(self._capacity, end)
            self.lazy_initialization(key_states, value_states)
        elif end > self._capacity:
            self._grow(end, key_states, value_states)
        self.keys[:rows, :, self.length : end] = key_states
        self.values[:rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def keep(self, length: int, positions: list[int]) -> None:
        end = length + len(positions)
        self.keys[:, :, length:end] = self.keys[:, :, positions]
        self.values[:, :, length:end] = self.values[:, :, positions]
        self.length = end

    def begin_with(self, source: "_GrowingLayer", padding: list[int]) -> None:
        self._make_room(source, len(padding))
        for row, left in enumerate(padding):
            fits = max(source.length - left, 0)
            self.keys[row, :, left : left + fits] = source.keys[0, :, :fits]
            self.values[row, :, left : left + fits] = source.values[0, :, :fits]
        self.length = source.length

    def place(self, source: "_GrowingLayer", rows: list[int], num_rows: int, end: int) -> None:
        if not self.is_initialized:
            self._make_room(source, num_rows)
        columns = slice(end - source.length, end)
        self.keys[rows, :, columns] = source.keys[: len(rows), :, : source.length]
        self.values[rows, :, columns] = source.values[: len(rows), :, : source.length]
        self.length = end

    def replace_row(self, row: int, by: int) -> None:
        self.keys[row, :, : self.length] = self.keys[by, :, : self.length]
        self.values[row, :, : self.length] = self.values[by, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def _room(self, states: Tensor) -> Tensor:
        rows, heads, _, dim = states.shape
        return states.new_zeros(rows, heads, self._capacity, dim)

    def _make_room(self, like: "_GrowingLayer", rows: int) -> None:
        self.lazy_initialization(like.keys[:1].expand(rows, -1, -1, -1), like.values[:1].expand(rows, -1, -1, -1))

    def _grow(self, end: int, key_states: Tensor, value_states: Tensor) -> None:
        old_keys, old_values = self.keys, self.values
        self._capacity = max(2 * self._capacity, end)
        self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[0]
        self.keys[:, :, : self.length] = old_keys[:rows, :, : self.length]
        self.values[:, :, : self.length] = old_values[:rows, :, : self.length]


@final
class _RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, capacity, dim], each row filled up to the cache's length for it."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: RaggedCache, capacity: int) -> None:
        self.keys, self.values = torch.empty(0), torch.empty(0)
        self.is_initialized = False
        self._cache = cache
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, new = key_states.shape[0], key_states.shape[2]
        columns = self._cache.lengths[:, None] + torch.arange(new)
        end = int(columns.max()) + 1
        if not self.is_initialized or end > self._capacity:
            self._grow(end, key_states, value_states)
        where = (torch.arange(rows)[:, None].to(self.keys.device), slice(None), columns.to(self.keys.device))
        self.keys[where] = key_states.transpose(1, 2)
        self.values[where] = value_states.transpose(1, 2)
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def replace_row(self, row: int, by: int) -> None:
        if self.is_initialized:
            self.keys[row], self.values[row] = self.keys[by], self.values[by]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self._cache.lengths.max())

    def get_max_length(self) -> int:
        return -1

    def _room(self, states: Tensor) -> Tensor:
        rows, heads, _, dim = states.shape
        return states.new_zeros(rows, heads, self._capacity, dim)

    def _grow(self, end: int, key_states: Tensor, value_states: Tensor) -> None:
        old_keys, old_values, held = self.keys, self.values, self._capacity
        was_initialized = self.is_initialized
        self._capacity = max(held, end) if not was_initialized else max(2 * held, end)
        self.lazy_initialization(key_states, value_states)
        if was_initialized:
            rows = key_states.shape[0]
            self.keys[:, :, :held], self.values[:, :, :held] = old_keys[:rows], old_values[:rows]
