"""Write the routes to a new state: frames chunk by chunk, and a table per route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from echo_node.storage.blob_dir import BlobDir
from echo_node.weights import parallel
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.route_reader import ANCHOR_CODEC, hash_of
from echo_node.weights.state_file import Bytes
from protocol import DELTA_CODEC, ZERO, ChunkTable, Frame, Route, blob_id, encode, encode_delta, encode_raw

Put: TypeAlias = Callable[[bytes | memoryview], bytes]
"""Function that keeps bytes as a blob, or only names it, and returns its hash."""


class RouteWriter:
    """Writes the routes of one new state."""

    def __init__(self, flat: FlatLayout, blobs: BlobDir, source: FlatSource) -> None:
        self._flat = flat
        self._blobs = blobs
        self._source = source
        self.after = parallel.each(lambda chunk: hash_of(source.chunk(chunk)), flat.chunks)
        """Hashes of the new chunks."""

    def delta(self, base_id: bytes, base: Callable[[Chunk], Bytes], hashes: Sequence[bytes]) -> Route:
        """Write a delta route from another state, given by its chunks and their hashes."""

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
        """Write an anchor: the state as a safetensors file, in one piece per chunk."""
        return self._anchor(self._blobs.put)

    def anchor_named(self) -> Route:
        """Return the anchor's route without writing it."""
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
