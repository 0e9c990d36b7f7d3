"""Keys and values of what a model has read: grown in place, cropped and thinned out without copying."""

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
        layers: list[Any] = []
        for layer in DynamicCache(config=model.config).layers:
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layers.append(_GrowingLayer(capacity))
            elif isinstance(layer, DummyLayer):
                layers.append(layer)
            else:
                raise CapabilityError(
                    f"{type(model).__name__} keeps a recurrent state ({type(layer).__name__}), which cannot be cropped "
                    "after a rejected draft. Models that only have attention layers can be used."
                )
        self.inner = Cache(layers=layers)
        self._growing = [layer for layer in layers if isinstance(layer, _GrowingLayer)]

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
