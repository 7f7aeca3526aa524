"""Weights messages: heads, routes, tables of frames, and the layout.

The rules by which heads follow one another are in `protocol.chain`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

import numpy as np

from protocol import limits
from protocol.digest import DIGEST_BYTES, ZERO
from protocol.errors import InconsistentError
from protocol.fields import (
    Counter,
    Digest,
    Ext,
    Slug,
    array,
    blob,
    check_ascending,
    choice,
    optional,
    pattern,
    uint,
)
from protocol.wire import of, record, row

Term = Annotated[int, uint(limits.SAFE_INTEGER, 1)]
ELEMENT_TYPES: Final = {"bf16": 2, "f16": 2, "f32": 4}
"""Element types of a layout, with their sizes in bytes."""


@record
class Route:
    """One way to this version: from head `base`, or from nothing (an anchor).

    `size` is all its bytes.
    """

    base: Annotated[bytes | None, optional(blob(DIGEST_BYTES, DIGEST_BYTES))]
    codec: Slug
    size: Counter
    table: Digest


@record
class WeightsHead:
    """One version of the weights: its proof, its routes, and the groups trained on."""

    KIND: ClassVar[str] = "head"
    LIMIT: ClassVar[int] = limits.HEAD_BYTES

    groups: Digest
    layout: Digest
    luck: Digest
    previous: Digest
    root: Digest
    roster: Digest
    routes: Annotated[tuple[Route, ...], array(of(Route), limits.ROUTES, 1)]
    step: Counter
    term: Term
    version: Counter
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        if (self.version == 0) != (self.previous == ZERO):
            raise InconsistentError("version 0, and only it, follows nothing", "previous")
        if self.version == 0 and (self.term, self.step) != (1, 0):
            raise InconsistentError("version 0 is step 0 of term 1", "version")
        if len({route.base for route in self.routes}) != len(self.routes):
            raise InconsistentError("two routes from one base", "routes")
        if self.version == 0 and self.anchor is None:
            raise InconsistentError("version 0 without an anchor", "routes")

    @property
    def anchor(self) -> Route | None:
        """Return the route that needs no earlier version."""
        return next((route for route in self.routes if route.base is None), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One chunk's bytes on a route: hash, size, and the hash of the chunk afterwards."""

    blob: bytes
    size: int
    after: bytes


@record
class ChunkTable:
    """Frames of a route, chunk after chunk, in columns.

    A chunk that does not change has size 0 and hash zero.
    """

    LIMIT: ClassVar[int] = limits.TABLE_BYTES

    after: Annotated[bytes, blob(DIGEST_BYTES * limits.CHUNKS, DIGEST_BYTES, DIGEST_BYTES)]
    codec: Slug
    frames: Annotated[bytes, blob(DIGEST_BYTES * limits.CHUNKS, DIGEST_BYTES, DIGEST_BYTES)]
    sizes: Annotated[bytes, blob(4 * limits.CHUNKS, 4, 4)]

    def check(self) -> None:
        count = len(self)
        if len(self.after) != DIGEST_BYTES * count or len(self.sizes) != 4 * count:
            raise InconsistentError("columns of different lengths")
        sizes = self._sizes()
        if int(sizes.max()) > limits.FRAME_BYTES:
            raise InconsistentError(f"a frame of more than {limits.FRAME_BYTES} bytes", "sizes")
        named = np.frombuffer(self.frames, np.uint8).reshape(count, DIGEST_BYTES).any(axis=1)
        if bool(((sizes > 0) != named).any()):
            raise InconsistentError("a frame with a size and no hash, or a hash and no size", "frames")

    @classmethod
    def of(cls, codec: str, frames: list[Frame]) -> ChunkTable:
        return cls(
            after=b"".join(frame.after for frame in frames),
            codec=codec,
            frames=b"".join(frame.blob for frame in frames),
            sizes=np.array([frame.size for frame in frames], "<u4").tobytes(),
        )

    def _sizes(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.frombuffer(self.sizes, "<u4")

    def __len__(self) -> int:
        return len(self.frames) // DIGEST_BYTES

    def __iter__(self) -> Iterator[Frame]:
        for index, size in enumerate(self._sizes()):
            place = slice(DIGEST_BYTES * index, DIGEST_BYTES * (index + 1))
            yield Frame(self.frames[place], int(size), self.after[place])


@row
class TensorEntry:
    """One tensor of the canonical state, by its name in the model's own files."""

    name: Annotated[
        str, pattern(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", limits.TENSOR_NAME_BYTES, "a tensor's name")
    ]
    dtype: Annotated[str, choice(*ELEMENT_TYPES)]
    shape: Annotated[tuple[int, ...], array(uint(2**40, 1), limits.TENSOR_RANK)]


@record
class Layout:
    """Tensors of the canonical state, sorted by name. A blob, named in the manifest."""

    LIMIT: ClassVar[int] = limits.LAYOUT_BYTES
    ITEMS: ClassVar[int] = limits.MANY_ITEMS

    tensors: Annotated[tuple[TensorEntry, ...], array(of(TensorEntry), limits.TENSORS, 1)]

    def check(self) -> None:
        check_ascending((tensor.name for tensor in self.tensors), "tensors")
