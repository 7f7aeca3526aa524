"""Read tensors in memory as a flat state, without a copy inside one tensor."""

from __future__ import annotations

import bisect

import numpy as np

from echo_node.errors import DefectError
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.state_file import Bytes
from echo_node.weights.tensors import State


class FlatSource:
    """State of a layout. Its tensors must not change while it is read."""

    def __init__(self, flat: FlatLayout, state: State) -> None:
        given = {name: (one.dtype, one.shape, len(one.data)) for name, one in state.items()}
        wanted = {one.name: (one.dtype, one.shape, one.size) for one in flat.tensors}
        if given != wanted:
            names = sorted(name for name in {*given, *wanted} if given.get(name) != wanted.get(name))
            raise DefectError(f"weights of another layout than the run's: see {', '.join(names[:3])}")
        self._flat = flat
        self._offsets = [tensor.offset for tensor in flat.tensors]
        self._data = [np.frombuffer(state[tensor.name].data, np.uint8) for tensor in flat.tensors]

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
            data, within = self._data[index], offset - self._offsets[index]
            piece = data[within : within + size]
            pieces.append(piece)
            offset, size, index = offset + piece.size, size - piece.size, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint8)])
