"""KV cache of rows started at different times, all ending in the same column.

Every decode step fills one more column, for all rows at once; columns before a row's first are
padding. So a step writes one slice and attends to a view: nothing is copied, and a sliding window
sees true distances. When the columns run out, all rows move to the left. transformers uses it as
its cache.
"""

from __future__ import annotations

from typing import Any, Final

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
        self.layers: list[KvCacheLayer] = []
        self.filling: tuple[Tensor, int] | None = None
        """During a prefill: the rows that a prompt fills, and the columns that it takes."""
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

    def before_prefill(self, rows: Tensor, columns: int, used: int) -> None:
        """Begin a prefill of rows that end in the current column; there must be room before it."""
        if not used:
            self.end = columns
        elif columns > self.end:
            self._move(columns, used)
        self.filling = (rows, columns)

    def after_prefill(self, rows: list[int], lengths: list[int]) -> None:
        self.filling = None
        for row, length in zip(rows, lengths, strict=True):
            self.starts[row] = self.end - length

    def before_decode(self, active: int) -> None:
        self.active, self.first = active, min(self.starts[:active])
        if self.end == self.width:
            self._move(self.end - self.first, active)
            self.first = 0

    def after_decode(self) -> None:
        self.end += 1

    def copy(self, source: int, target: int, length: int) -> None:
        begin, to = self.starts[source], self.end - length
        for layer in self.layers:
            layer.copy(source, target, begin, to, length)
        self.starts[target] = to

    def _move(self, end: int, used: int) -> None:
        """Let the rows in use end at another column."""
        first = min(self.starts[:used])
        by = end - self.end
        for layer in self.layers:
            layer.move(used, first, self.end, by)
        self.starts[:used] = [start + by for start in self.starts[:used]]
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
            self.keys[rows, :, here.end - columns : here.end] = key_states
            self.values[rows, :, here.end - columns : here.end] = value_states
            return key_states, value_states
        self.keys[: here.active, :, here.end : here.end + 1] = key_states
        self.values[: here.active, :, here.end : here.end + 1] = value_states
        seen = slice(here.first, here.end + 1)
        return self.keys[: here.active, :, seen], self.values[: here.active, :, seen]

    def get_seq_length(self) -> int:
        here = self._columns
        return 0 if here.filling is not None else here.end - here.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def copy(self, source: int, target: int, begin: int, to: int, length: int) -> None:
        for block in (self.keys, self.values):
            block[target, :, to : to + length] = block[source, :, begin : begin + length]

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
