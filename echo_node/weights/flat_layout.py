"""Offsets in the flat state of a layout: tensors, chunks and safetensors header.

The flat state is the tensors in the order of their names, without a gap. Behind its header it is an
anchor, byte for byte, since that has the tensors in the same order.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from echo_node.engine.base import Dtype
from protocol import Layout, blob_id, encode, limits
from protocol.errors import InconsistentError, OutOfRangeError
from protocol.weights import ELEMENT_TYPES

METADATA: Final = "__metadata__"
"""Name that a safetensors header reserves for itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: first element and byte in the flat state, and their numbers."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    element: int
    elements: int
    offset: int

    @property
    def width(self) -> int:
        return ELEMENT_TYPES[self.dtype]

    @property
    def size(self) -> int:
        return self.elements * self.width


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: first element and byte, and their numbers.

    `narrow`: all its elements have 16 bits.
    """

    index: int
    element: int
    elements: int
    offset: int
    size: int

    @property
    def narrow(self) -> bool:
        return self.size == 2 * self.elements


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a tensor in a chunk: first element, number, and byte within the chunk."""

    tensor: Tensor
    first: int
    elements: int
    at: int


class FlatLayout:
    """Map of a flat state."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tensors: tuple[Tensor, ...] = tuple(_place(layout))
        self._elements = [tensor.element for tensor in self.tensors]
        last = self.tensors[-1]
        self.elements = last.element + last.elements
        self.size = last.offset + last.size
        if self.elements > limits.CHUNKS * limits.CHUNK_ELEMENTS:
            raise OutOfRangeError(
                f"a layout of {self.elements} elements, which do not fit into {limits.CHUNKS} chunks",
                "tensors",
            )
        self.chunks: tuple[Chunk, ...] = tuple(self._cut())

    @functools.cached_property
    def id(self) -> bytes:
        return blob_id(encode(self.layout))

    @functools.cached_property
    def header(self) -> bytes:
        """Return the safetensors header in its one canonical form: its hash is in heads."""
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        for tensor in self.tensors:
            header[tensor.name] = {
                "dtype": tensor.dtype.upper(),
                "shape": list(tensor.shape),
                "data_offsets": [tensor.offset, tensor.offset + tensor.size],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def anchor_size(self) -> int:
        return len(self.header) + self.size

    def anchor_cuts(self) -> list[int]:
        """Return the borders of an anchor's frames: one per chunk, of nearly one size."""
        return cuts(self.anchor_size, len(self.chunks))

    def stretches(self, chunk: Chunk) -> Iterator[Stretch]:
        """Iterate over the tensors that a chunk holds a part of, in order."""
        end, at = chunk.element + chunk.elements, 0
        first = bisect.bisect_right(self._elements, chunk.element) - 1
        for tensor in self.tensors[first : bisect.bisect_left(self._elements, end)]:
            start = max(chunk.element - tensor.element, 0)
            count = min(end - tensor.element, tensor.elements) - start
            yield Stretch(tensor, start, count, at)
            at += count * tensor.width

    def _cut(self) -> Iterator[Chunk]:
        step = limits.CHUNK_ELEMENTS
        for index in range(math.ceil(self.elements / step)):
            start, end = index * step, min((index + 1) * step, self.elements)
            offset = self._byte(start)
            yield Chunk(index, start, end - start, offset, self._byte(end) - offset)

    def _byte(self, element: int) -> int:
        tensor = self.tensors[bisect.bisect_right(self._elements, element) - 1]
        return tensor.offset + (element - tensor.element) * tensor.width


def cuts(size: int, count: int) -> list[int]:
    """Return the borders of `count` pieces of nearly one size."""
    return [size * index // count for index in range(count + 1)]


def _place(layout: Layout) -> Iterator[Tensor]:
    element = offset = 0
    for entry in layout.tensors:
        if entry.name == METADATA:
            raise InconsistentError(f"a tensor cannot be called {METADATA}: anchors have that for themselves")
        dtype: Dtype = entry.dtype  # type: ignore[assignment] # the layout has checked it
        tensor = Tensor(entry.name, dtype, entry.shape, element, math.prod(entry.shape), offset)
        yield tensor
        element += tensor.elements
        offset += tensor.size
