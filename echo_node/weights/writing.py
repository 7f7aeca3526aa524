"""From a new state to the routes that lead to it: frames into the folder, chunk by chunk, and a table for each route.

Deltas start from a base chunk that is handed in, whichever version that is of. It knows no heads and signs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from echo_node.weights import parallel
from echo_node.weights.blobfolder import BlobFolder
from echo_node.weights.flat import Chunk, FlatLayout
from echo_node.weights.passage import ANCHOR_CODEC, hash_of
from echo_node.weights.scratch import Bytes
from echo_node.weights.source import FlatSource
from protocol import DELTA_CODEC, ZERO, ChunkTable, Frame, Route, blob_id, encode, encode_delta, encode_raw

Put: TypeAlias = Callable[[bytes | memoryview], bytes]
"""Keeps some bytes, or does not, and says what they are called."""


class RouteWriter:
    """Writes the routes of one new state."""

    def __init__(self, flat: FlatLayout, blobs: BlobFolder, source: FlatSource) -> None:
        self._flat = flat
        self._blobs = blobs
        self._source = source
        self.after = parallel.each(lambda chunk: hash_of(source.chunk(chunk)), flat.chunks)
        """The hashes of the new chunks."""

    def delta(self, base_id: bytes, base: Callable[[Chunk], Bytes], hashes: Sequence[bytes]) -> Route:
        """From another state, whose chunks and their hashes are given."""

        def write(chunk: Chunk) -> Frame:
            after = self.after[chunk.index]
            if after == hashes[chunk.index]:
                return Frame(ZERO, 0, after)
            new, old = self._source.chunk(chunk), base(chunk)
            data = (
                encode_delta(old.view("<u2"), new.view("<u2")) if chunk.narrow else encode_raw(new.tobytes())
            )
            return Frame(self._blobs.put(data), len(data), after)

        return self._route(base_id, DELTA_CODEC, parallel.each(write, self._flat.chunks), self._blobs.put)

    def anchor(self) -> Route:
        """From nothing: the state as a safetensors file, in as many pieces as there are chunks."""
        return self._anchor(self._blobs.put)

    def anchor_named(self) -> Route:
        """The same, as it would be called, and nothing written."""
        return self._anchor(blob_id)  # type: ignore[arg-type] # any buffer will do

    def _anchor(self, put: Put) -> Route:
        places = list(pairwise(self._flat.anchor_cuts()))

        def write(index: int) -> Frame:
            start, end = places[index]
            data = self._source.anchor(start, end)
            return Frame(put(data.data), end - start, self.after[index])

        return self._route(None, ANCHOR_CODEC, parallel.each(write, range(len(places))), put)

    def _route(self, base: bytes | None, codec: str, frames: list[Frame], put: Put) -> Route:
        table = put(encode(ChunkTable.of(codec, frames)))
        return Route(base=base, codec=codec, size=sum(frame.size for frame in frames), table=table)
