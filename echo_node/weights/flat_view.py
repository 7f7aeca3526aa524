"""Read tensors in memory as a flat state, without a copy inside one tensor."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from echo_node.engine.base import Dtype, TensorBytes
from echo_node.errors import DefectError
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.state_file import Bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorReader:
    """A tensor of `size` bytes, read in pieces from memory that changes later.

    `read(start, end)` returns some of its bytes, from several threads at once.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    size: int
    read: Callable[[int, int], Bytes]


ReadableState: TypeAlias = Mapping[str, TensorBytes | TensorReader]
"""Tensors by name, as bytes or to be read in pieces."""


class FlatSource:
    """State of a layout. Its tensors must not change while it is read."""

    def __init__(self, flat: FlatLayout, state: ReadableState) -> None:
        given = {name: (one.dtype, one.shape, _size(one)) for name, one in state.items()}
        wanted = {one.name: (one.dtype, one.shape, one.size) for one in flat.tensors}
        if given != wanted:
            names = sorted(name for name in {*given, *wanted} if given.get(name) != wanted.get(name))
            raise DefectError(f"weights of another layout than the run's: see {', '.join(names[:3])}")
        self._flat = flat
        self._offsets = [tensor.offset for tensor in flat.tensors]
        self._tensors = [(tensor.size, _reader(state[tensor.name])) for tensor in flat.tensors]

    def chunk(self, chunk: Chunk) -> Bytes:
        return self.read(chunk.offset, chunk.size)

    def anchor(self, start: int, end: int) -> Bytes:
        """Return bytes of the safetensors file of this state."""
        header = np.frombuffer(self._flat.header, np.uint8)
        body = max(start - header.size, 0)
        rest = self.read(body, max(end - header.size, 0) - body)
        return np.concatenate((header[start:end], rest)) if start < header.size else rest

    def read(self, offset: int, size: int) -> Bytes:
        """Return bytes of the flat state, read-only."""
        pieces: list[Bytes] = []
        index = bisect.bisect_right(self._offsets, offset) - 1
        while size:
            length, read = self._tensors[index]
            within = offset - self._offsets[index]
            piece = read(within, min(within + size, length))
            pieces.append(piece)
            offset, size, index = offset + piece.size, size - piece.size, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint8)])


def _size(tensor: TensorBytes | TensorReader) -> int:
    return tensor.size if isinstance(tensor, TensorReader) else len(tensor.data)


def _reader(tensor: TensorBytes | TensorReader) -> Callable[[int, int], Bytes]:
    if isinstance(tensor, TensorReader):
        return tensor.read
    data = np.frombuffer(tensor.data, np.uint8)
    return lambda start, end: data[start:end]
