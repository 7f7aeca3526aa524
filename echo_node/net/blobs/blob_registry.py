"""Blobs that this node serves, in memory or in immutable files.

Blobs are kept under the name of what they belong to (a head, a table); the oldest name goes first.
Reading blocks, so it is done in threads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from echo_node.errors import DefectError, StoreError, boundary
from protocol.blob import Slice
from protocol.errors import OutOfRangeError

NAMES: Final = 64
"""Names kept at once."""
MEMORY_BYTES: Final = 4 * 1024**3
"""Bytes of blobs kept in memory."""
WINDOW: Final = 1024 * 1024
"""Bytes per read and per write."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A blob that is a file, or a range of one."""

    path: Path
    size: int
    offset: int = 0


Held: TypeAlias = bytes | InFile


class BlobRegistry:
    """Blobs under names, bounded in names and in bytes of memory."""

    def __init__(self, names: int = NAMES, memory_bytes: int = MEMORY_BYTES) -> None:
        self._names: OrderedDict[bytes, dict[bytes, Held]] = OrderedDict()
        self._most_names = names
        self._most_bytes = memory_bytes

    def keep(self, name: bytes, blobs: Mapping[bytes, Held]) -> None:
        """Keep the verified blobs of a name, and drop the oldest names beyond the bounds."""
        size = _in_memory(blobs)
        if size > self._most_bytes:
            raise DefectError(
                f"{size} bytes under one name, and there is room for {self._most_bytes}",
                advice="keep them in files",
            )
        self._names.pop(name, None)
        self._names[name] = dict(blobs)
        while len(self._names) > self._most_names or self._total() > self._most_bytes:
            self._names.popitem(last=False)

    def remove(self, name: bytes) -> None:
        self._names.pop(name, None)

    def size(self, blob: bytes) -> int | None:
        """Return the size of a blob in bytes, or None if it is not held."""
        held = self._find(blob)
        return len(held) if isinstance(held, bytes) else held.size if held else None

    def check(self, slices: tuple[Slice, ...]) -> int:
        """Return the bytes of some slices; raise unless all of them are held."""
        for each in slices:
            size = self.size(each.blob)
            if size is None:
                raise OutOfRangeError("this node does not hold that blob", "slices")
            if each.offset + each.length > size:
                raise OutOfRangeError(f"bytes beyond the end of a blob of {size}", "slices")
        return sum(each.length for each in slices)

    def windows(self, slices: tuple[Slice, ...]) -> Iterator[memoryview]:
        """Yield the bytes of some slices in windows, each valid until the next. Blocks."""
        for each in slices:
            held = self._find(each.blob)
            if held is None:
                raise StoreError("a blob was dropped while it was being read")
            if isinstance(held, bytes):
                whole = memoryview(held)[each.offset : each.offset + each.length]
                yield from (whole[at : at + WINDOW] for at in range(0, each.length, WINDOW))
            else:
                yield from _file_windows(held, each)

    def read(self, slices: tuple[Slice, ...]) -> bytes:
        """Return the bytes of some slices. Blocks."""
        return b"".join(bytes(window) for window in self.windows(slices))

    def _find(self, blob: bytes) -> Held | None:
        # Threads read while the event loop changes the names: one step copies them.
        for blobs in reversed(tuple(self._names.values())):
            if blob in blobs:
                return blobs[blob]
        return None

    def _total(self) -> int:
        return sum(_in_memory(blobs) for blobs in self._names.values())


def _in_memory(blobs: Mapping[bytes, Held]) -> int:
    return sum(len(held) for held in blobs.values() if isinstance(held, bytes))


def _file_windows(held: InFile, asked: Slice) -> Iterator[memoryview]:
    # Read, not mapped: truncating a mapped file ends the process.
    buffer = memoryview(bytearray(min(WINDOW, asked.length)))
    with boundary(StoreError, f"reading {held.path.name}"), held.path.open("rb", buffering=0) as file:
        for at in range(0, asked.length, WINDOW):
            window = buffer[: min(WINDOW, asked.length - at)]
            filled = 0
            while filled < len(window):
                place = held.offset + asked.offset + at + filled
                count = os.preadv(file.fileno(), [window[filled:]], place)
                if not count:
                    raise StoreError(f"{held.path.name} was truncated")
                filled += count
            yield window
