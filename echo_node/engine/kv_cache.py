"""KV cache of rows started at different times, all ending in the same column.

Every decode step fills one more column, for all rows at once; columns before a row's first are
padding. So a step writes one slice and attends to a view: nothing is copied, and a sliding window
sees true distances. When the columns run out, all rows move to the left. A row at rest keeps its
columns while others go on, and is moved to the end when it is extended. transformers uses it as its
cache.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE: Final = 4
"""One column in so many is there for moving less often."""


class KvCache:
    """Which columns are in use, for all layers."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows = rows
        self.length = length
        self.width = length + max(64, length // SPARE)
        self.end = 0
        """The column that the next token goes to."""
        self.starts: list[int] = [0] * rows
        self.stops: list[int] = [0] * rows
        """The column after each row's last; rows at rest end before the others."""
        self.live: set[int] = set()
        """Rows whose columns must be kept."""
        self.resting: tuple[int, ...] = ()
        self.layers: list[KvCacheLayer] = []
        self.filling: tuple[Tensor, int] | None = None
        """During a prefill: the rows that a prompt fills, and the columns that it takes."""
        self.packed: list[Tensor] | None = None
        """During a prefill of prompts packed into one row: the places of each in it."""
        self.extending: tuple[Tensor, int] | None = None
        """During an extension: the rows, and how many columns are added to each."""
        self.active = 0
        """During a decode step: the number of rows, and their first column."""
        self.first = 0

    def cache(self) -> Cache:
        """Return this cache in the form that transformers takes."""
        return _Cache(self)

    def holds(self, rows: int, length: int) -> bool:
        """Return whether `rows` rows of `length` positions fit."""
        return rows <= self.rows and length <= self.length

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def before_prefill(
        self, rows: Tensor, columns: int, used: int, packed: list[Tensor] | None = None
    ) -> None:
        """Begin a prefill of rows that end in the current column.

        There must be room before it. With `packed` all of them come as one row.
        """
        if not used:
            self.end = columns
            self.live.clear()
        elif columns > self.end:
            self._move(columns)
        self.filling, self.packed = (rows, columns), packed

    def after_prefill(self, rows: list[int], lengths: list[int]) -> None:
        self.filling = self.packed = None
        for row, length in zip(rows, lengths, strict=True):
            self._put(row, self.end - length)

    def before_extend(self, rows: list[int], count: int) -> None:
        """Begin to add `count` columns to rows; move their contents just before."""
        lengths = [self.stops[row] - self.starts[row] for row in rows]
        if (longest := max(lengths) + count) > self.end:
            self._move(longest)
        for row, length in zip(rows, lengths, strict=True):
            to = self.end - count - length
            for layer in self.layers:
                layer.copy(row, row, self.starts[row], to, length)
            self._put(row, to)
        self.first = min(self.starts[row] for row in rows)
        self.extending = (torch.tensor(rows), count)

    def after_extend(self) -> None:
        self.extending = None

    def before_decode(self, active: int) -> None:
        self.live = {*range(active), *self.resting}
        if self.end == self.width:
            self._move(max(self.stops[row] - self.starts[row] for row in self.live))
        self.active, self.first = active, min(self.starts[:active])

    def after_decode(self) -> None:
        self.end += 1
        self.stops[: self.active] = [self.end] * self.active

    def copy(self, source: int, target: int, length: int) -> None:
        begin, to = self.starts[source], self.end - length
        for layer in self.layers:
            layer.copy(source, target, begin, to, length)
        self._put(target, to)

    def _put(self, row: int, start: int) -> None:
        """Note that a row holds the columns from `start` to the current one."""
        self.starts[row], self.stops[row] = start, self.end
        self.live.add(row)

    def _move(self, end: int) -> None:
        """Let all rows that are kept end at another column."""
        for row in self.live:
            if self.stops[row] < self.end:  # it rested while others went on
                length = self.stops[row] - self.starts[row]
                for layer in self.layers:
                    layer.copy(row, row, self.starts[row], self.end - length, length)
                self._put(row, self.end - length)
        first, by = min(self.starts[row] for row in self.live), end - self.end
        for layer in self.layers:
            layer.move(max(self.live) + 1, first, self.end, by)
        for row in self.live:
            self.starts[row] += by
            self.stops[row] += by
        self.end = end


class KvCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, size of a head]."""

    is_sliding = False

    def __init__(self, columns: KvCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._columns = columns
        self.keys: Tensor
        self.values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def block(states: Tensor) -> Tensor:
            return states.new_zeros(self._columns.rows, states.shape[1], self._columns.width, states.shape[3])

        self.keys, self.values = block(key_states), block(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        here = self._columns
        if here.filling is not None:
            rows, columns = here.filling
            if here.packed is not None:
                for row, places in zip(rows.tolist(), here.packed, strict=True):
                    own = slice(here.end - len(places), here.end)
                    self.keys[row, :, own] = key_states[0, :, places]
                    self.values[row, :, own] = value_states[0, :, places]
                return key_states, value_states
            self.keys[rows, :, here.end - columns : here.end] = key_states
            self.values[rows, :, here.end - columns : here.end] = value_states
            return key_states, value_states
        if here.extending is not None:
            rows, count = here.extending
            self.keys[rows, :, here.end - count : here.end] = key_states
            self.values[rows, :, here.end - count : here.end] = value_states
            return self.keys[rows, :, here.first : here.end], self.values[rows, :, here.first : here.end]
        self.keys[: here.active, :, here.end : here.end + 1] = key_states
        self.values[: here.active, :, here.end : here.end + 1] = value_states
        seen = slice(here.first, here.end + 1)
        return self.keys[: here.active, :, seen], self.values[: here.active, :, seen]

    def get_seq_length(self) -> int:
        here = self._columns
        if here.extending is not None:
            return here.end - here.extending[1] - here.first
        return 0 if here.filling is not None else here.end - here.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def copy(self, source: int, target: int, begin: int, to: int, length: int) -> None:
        for block in (self.keys, self.values):
            columns = block[source, :, begin : begin + length]
            block[target, :, to : to + length] = columns.clone() if source == target else columns

    def move(self, used: int, first: int, end: int, by: int) -> None:
        for block in (self.keys, self.values):
            block[:used, :, first + by : end + by] = block[:used, :, first:end].clone()


class _Cache(Cache):
    """One `KvCacheLayer` for each layer that asks for one."""

    def __init__(self, columns: KvCache) -> None:
        def layer() -> KvCacheLayer:
            columns.layers.append(KvCacheLayer(columns))
            return columns.layers[-1]

        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]
