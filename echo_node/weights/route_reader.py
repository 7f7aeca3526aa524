"""Read one route: check its table, and build proven chunks in memory.

Chunks are built one by one and in any order, from a base chunk and the frames in a folder. Writes
nothing.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Final

import numpy as np

from echo_node.storage.blob_dir import BlobDir, DamagedBlobError
from echo_node.weights.errors import UnprovenError, unproven
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.route_graph import Step
from echo_node.weights.state_file import Bytes
from protocol import (
    DELTA_CODEC,
    RAW_CODEC,
    ChunkTable,
    Frame,
    Route,
    blob_id,
    decode,
    decode_delta,
    decode_raw,
    limits,
    merkle_root,
)

ANCHOR_CODEC: Final = "safetensors"


def read_table(blobs: BlobDir, route: Route) -> ChunkTable | None:
    """Return the table of a route, if it is here and complete."""
    if not blobs.has(route.table):
        return None
    try:
        data = blobs.read(route.table, limits.TABLE_BYTES)
    except DamagedBlobError:
        return None
    with unproven("reading a table of frames"):
        return decode(ChunkTable, data)


def missing_frames(blobs: BlobDir, table: ChunkTable) -> list[Frame]:
    """Return the frames of a table that are not here, each once."""
    named = {frame.blob: frame for frame in table if frame.size}
    return [frame for frame in named.values() if blobs.size(frame.blob) != frame.size]


class RouteReader:
    """Reader of a step whose table was checked: chunk count, root, size and codec."""

    def __init__(self, flat: FlatLayout, blobs: BlobDir, step: Step, table: ChunkTable) -> None:
        self._flat = flat
        self._blobs = blobs
        self._route = step.route
        self._name = f"version {step.head.message.version}"
        self._frames = list(table)
        self.after = [frame.after for frame in self._frames]
        """Hashes of the chunks after the step."""
        self._check_table(step, table)
        if missing := missing_frames(blobs, table):
            raise UnprovenError("missing-blob", f"{len(missing)} frames of {self._name} are not here")
        self._starts = [0, *itertools.accumulate(frame.size for frame in self._frames)]
        if self._route.codec == ANCHOR_CODEC:
            self._check_header()

    def build(self, chunk: Chunk, base: Bytes | None) -> Bytes:
        """Build a chunk from a base chunk, which may be overwritten."""
        with unproven(f"chunk {chunk.index} of {self._name}"):
            made = self._made(chunk, base)
        if hash_of(made) != self.after[chunk.index]:
            self._blame_disk(chunk)
            raise UnprovenError(
                "wrong-after-hash", f"chunk {chunk.index} of {self._name} comes out as another one"
            )
        return made

    def _made(self, chunk: Chunk, base: Bytes | None) -> Bytes:
        if self._route.codec == ANCHOR_CODEC:
            made = np.empty(chunk.size, np.uint8)
            self._read_anchor(len(self._flat.header) + chunk.offset, made.data)
            return made
        frame = self._frames[chunk.index]
        if not frame.size:
            if base is None:
                raise UnprovenError(
                    "wrong-table", f"{self._name} has no frame for a chunk that comes from nothing"
                )
            return base
        data = self._blobs.read(frame.blob)
        if self._route.codec == DELTA_CODEC and chunk.narrow:
            if base is None:
                raise UnprovenError("wrong-base", f"{self._name} is a change of nothing")
            patterns = base.view("<u2")
            decode_delta(data, patterns).write(patterns)
            return base
        # a copy: the next step may write into it
        return np.frombuffer(decode_raw(data, chunk.size), np.uint8).copy()

    def _check_table(self, step: Step, table: ChunkTable) -> None:
        codec, base = step.route.codec, step.route.base
        if codec not in {ANCHOR_CODEC, DELTA_CODEC, RAW_CODEC}:
            raise UnprovenError(
                "unknown-codec", f"{self._name} is written in {codec}, which this node cannot read"
            )
        if (codec == ANCHOR_CODEC and base is not None) or (codec == DELTA_CODEC and base is None):
            raise UnprovenError(
                "wrong-base", f"{self._name} has a route of {codec} from the wrong kind of base"
            )
        if table.codec != codec or sum(frame.size for frame in self._frames) != step.route.size:
            raise UnprovenError("wrong-table", f"the table of {self._name} is not what its head says of it")
        if len(table) != len(self._flat.chunks):
            raise UnprovenError(
                "wrong-layout",
                f"{self._name} has {len(table)} chunks, the layout has {len(self._flat.chunks)}",
            )
        if merkle_root(self.after) != step.head.message.root:
            raise UnprovenError("wrong-root", f"the chunks of {self._name} are not those of its root")

    def _check_header(self) -> None:
        """Check that an anchor begins with its layout's canonical header.

        Otherwise it could not be read by offset.
        """
        wanted = self._flat.header
        if self._starts[-1] != self._flat.anchor_size:
            raise UnprovenError(
                "wrong-layout", f"the anchor of {self._name} has another size than its layout"
            )
        found = bytearray(len(wanted))
        self._read_anchor(0, memoryview(found))
        if found != wanted:
            raise UnprovenError(
                "wrong-layout", f"the anchor of {self._name} has the header of another layout"
            )

    def _read_anchor(self, start: int, into: memoryview) -> None:
        """Read bytes of the safetensors file that an anchor's frames make up."""
        done = 0
        while done < len(into):
            index = bisect.bisect_right(self._starts, start + done) - 1
            within = start + done - self._starts[index]
            count = min(self._frames[index].size - within, len(into) - done)
            self._blobs.read_part(self._frames[index].blob, within, into[done : done + count])
            done += count

    def _blame_disk(self, chunk: Chunk) -> None:
        """Raise if a frame was damaged on this disk. Other frames are hashed at each read."""
        if self._route.codec != ANCHOR_CODEC:
            return
        start = len(self._flat.header) + chunk.offset
        for index, frame in enumerate(self._frames):
            if self._starts[index] < start + chunk.size and start < self._starts[index + 1]:
                self._blobs.read(frame.blob)


def hash_of(chunk: Bytes) -> bytes:
    return blob_id(chunk.data)  # type: ignore[arg-type] # any buffer will do
