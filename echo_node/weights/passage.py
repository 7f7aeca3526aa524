"""One route, opened: its table is what the head says, and each chunk comes out proven or not at all. Writes nothing.

A passage builds chunks in memory, one by one and in any order, from a base chunk and the frames in a folder. Whose base
it is, and where the result goes, is not known here.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Final

import numpy as np

from echo_node.weights.blobfolder import BlobFolder, DamagedBlobError
from echo_node.weights.flat import Chunk, FlatLayout
from echo_node.weights.refusal import UnprovenError, unproven
from echo_node.weights.routes import Step
from echo_node.weights.scratch import Bytes
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


def read_table(blobs: BlobFolder, route: Route) -> ChunkTable | None:
    """The table of a route, if it is here, and whole."""
    if not blobs.has(route.table):
        return None
    try:
        data = blobs.read(route.table, limits.TABLE_BYTES)
    except DamagedBlobError:
        return None
    with unproven("reading a table of frames"):
        return decode(ChunkTable, data)


def missing_frames(blobs: BlobFolder, table: ChunkTable) -> list[Frame]:
    """The frames of a table that are not here, each once."""
    named = {frame.blob: frame for frame in table if frame.size}
    return [frame for frame in named.values() if blobs.size(frame.blob) != frame.size]


class Passage:
    """A step whose table was checked: as many chunks as the layout has, the head's root, the route's size and codec."""

    def __init__(self, flat: FlatLayout, blobs: BlobFolder, step: Step, table: ChunkTable) -> None:
        self._flat = flat
        self._blobs = blobs
        self._route = step.route
        self._name = f"version {step.head.message.version}"
        self._frames = list(table)
        self.after = [frame.after for frame in self._frames]
        """The hashes of the chunks that come out."""
        self._check_table(step, table)
        if missing := missing_frames(blobs, table):
            raise UnprovenError("missing-blob", f"{len(missing)} frames of {self._name} are not here")
        self._starts = [0, *itertools.accumulate(frame.size for frame in self._frames)]
        if self._route.codec == ANCHOR_CODEC:
            self._check_header()

    def build(self, chunk: Chunk, base: Bytes | None) -> Bytes:
        """The chunk that a base becomes. The base may be overwritten."""
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
        return np.frombuffer(decode_raw(data, chunk.size), np.uint8).copy()  # the next step may write into it

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
        """An anchor is the header of its layout, in its one form, and the flat state; nothing else can be read by place."""
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
        """Bytes of the file that the frames of an anchor are in a row."""
        done = 0
        while done < len(into):
            index = bisect.bisect_right(self._starts, start + done) - 1
            within = start + done - self._starts[index]
            count = min(self._frames[index].size - within, len(into) - done)
            self._blobs.read_part(self._frames[index].blob, within, into[done : done + count])
            done += count

    def _blame_disk(self, chunk: Chunk) -> None:
        """Raise if what was read is not what was once written here. Other frames are hashed whenever they are read."""
        if self._route.codec != ANCHOR_CODEC:
            return
        start = len(self._flat.header) + chunk.offset
        for index, frame in enumerate(self._frames):
            if self._starts[index] < start + chunk.size and start < self._starts[index + 1]:
                self._blobs.read(frame.blob)


def hash_of(chunk: Bytes) -> bytes:
    return blob_id(chunk.data)  # type: ignore[arg-type] # any buffer will do
