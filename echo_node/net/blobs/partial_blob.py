"""Incomplete blobs, in memory or in a folder from which a download resumes.

On disk an incomplete blob is `<id>.part` beside `<id>.pieces`, a log of the written pieces and
their hashes. Logged pieces are read and hashed again before they count, and the hash of the whole
decides. Only a complete, verified and synced blob is ever named `<id>`. Everything here blocks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from blake3 import blake3

from echo_node.errors import DefectError, StoreError, boundary

_HEAD: Final = struct.Struct("<8s32sQ")
_ENTRY: Final = struct.Struct("<QQ32s")
_MAGIC: Final = b"echopart"
_ROOM: Final = "see whether there is room on the disk, and whether it may be written to"
STEP: Final = 1024 * 1024
"""Bytes hashed at once."""

Place: TypeAlias = tuple[int, int]
"""An offset and a length."""


class PartialBlob(Protocol):
    """A blob of known size, of which some pieces are here."""

    light: bool
    """Whether writing is quick enough for the event loop."""

    def present(self) -> dict[Place, bytes]:
        """Return hashes of pieces from an earlier download by place, each read again."""

    def write(self, offset: int, data: bytes | memoryview, digest: bytes) -> None: ...

    def write_other(self, offset: int, data: bytes | memoryview) -> None:
        """Keep a second version of a piece beside the first."""

    def finish(self, blob: bytes, other: Collection[Place] = ()) -> bool:
        """Store the blob if its hash is right with the second version at some places."""

    def close(self) -> None:
        """Close the files; a later download resumes from them."""


class MemoryPartialBlob:
    """An incomplete blob in memory."""

    light = True

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self._other: dict[int, bytes] = {}

    def present(self) -> dict[Place, bytes]:
        return {}

    def write(self, offset: int, data: bytes | memoryview, digest: bytes) -> None:  # noqa: ARG002
        self.data[offset : offset + len(data)] = data

    def write_other(self, offset: int, data: bytes | memoryview) -> None:
        self._other[offset] = bytes(data)

    def finish(self, blob: bytes, other: Collection[Place] = ()) -> bool:
        found = blake3()
        for here, offset, length in _stretches(len(self.data), other):
            found.update(memoryview(self.data)[offset : offset + length] if here else self._other[offset])
        if found.digest() != blob:
            return False
        for offset, length in other:
            self.data[offset : offset + length] = self._other[offset]
        return True

    def close(self) -> None:
        self._other.clear()


class SmallFilePartialBlob:
    """A blob of one piece in a folder: verified on arrival, so stored at once."""

    light = False

    def __init__(self, folder: Path, blob: bytes, size: int) -> None:
        self._final = folder / blob.hex()
        self._blob = blob
        self._size = size
        self._there = False

    def present(self) -> dict[Place, bytes]:
        return {}

    def write(self, offset: int, data: bytes | memoryview, digest: bytes) -> None:
        if (offset, len(data), digest) != (0, self._size, self._blob):
            raise DefectError("a small blob must be written as a whole and verified")
        part = self._final.with_suffix(f".{secrets.token_hex(4)}.part")
        with boundary(StoreError, f"writing {self._final.name}", advice=_ROOM):
            try:
                with part.open("xb", buffering=0) as file:
                    _write(file.fileno(), 0, memoryview(data))
                    os.fsync(file.fileno())
                part.rename(self._final)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            _sync_folder(self._final.parent)
        self._there = True

    def write_other(self, offset: int, data: bytes | memoryview) -> None:  # noqa: ARG002
        raise DefectError("a small blob has no second version")

    def finish(self, blob: bytes, other: Collection[Place] = ()) -> bool:  # noqa: ARG002
        if not self._size and blake3().digest() == blob:
            self.write(0, b"", blob)
        return self._there

    def close(self) -> None:
        return


class FilePartialBlob:
    """An incomplete blob in a folder. A second writer of the same blob is refused."""

    light = False

    def __init__(self, folder: Path, blob: bytes, size: int) -> None:
        self.final = folder / blob.hex()
        self._size = size
        self._part = self.final.with_suffix(".part")
        self._list = self.final.with_suffix(".pieces")
        self._beside = self.final.with_suffix(".other")
        self._other = -1
        self._head = _HEAD.pack(_MAGIC, blob, size)
        self._entries = b""
        with boundary(StoreError, f"writing into {folder.name}", advice=_ROOM):
            self._data = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._log = os.open(self._list, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._begin()

    def _begin(self) -> None:
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StoreError(
                f"{self._part.name} is being written by another download", advice="wait for it to end"
            ) from None
        listed = self._list.read_bytes()
        if listed[: _HEAD.size] == self._head:
            self._entries = listed[_HEAD.size :]
            if loose := len(self._entries) % _ENTRY.size:  # an entry that a crash cut short
                os.ftruncate(self._log, len(listed) - loose)
        else:
            os.ftruncate(self._log, 0)
            os.write(self._log, self._head)
            os.ftruncate(self._data, 0)
        os.ftruncate(self._data, self._size)

    def present(self) -> dict[Place, bytes]:
        complete = len(self._entries) - len(self._entries) % _ENTRY.size
        listed = {
            (offset, length): digest
            for offset, length, digest in _ENTRY.iter_unpack(self._entries[:complete])
        }
        return {
            (offset, length): digest
            for (offset, length), digest in listed.items()
            if offset + length <= self._size and self._hash(offset, length) == digest
        }

    def write(self, offset: int, data: bytes | memoryview, digest: bytes) -> None:
        with boundary(StoreError, f"writing {self._part.name}", advice=_ROOM):
            _write(self._data, offset, memoryview(data))
            os.write(self._log, _ENTRY.pack(offset, len(data), digest))

    def write_other(self, offset: int, data: bytes | memoryview) -> None:
        with boundary(StoreError, f"writing {self._beside.name}", advice=_ROOM):
            if self._other < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._other = os.open(self._beside, flags, 0o644)
            _write(self._other, offset, memoryview(data))

    def finish(self, blob: bytes, other: Collection[Place] = ()) -> bool:
        with boundary(StoreError, f"finishing {self._part.name}", advice=_ROOM):
            found = blake3()
            for here, offset, length in _stretches(self._size, other):
                _hash_into(found, self._data if here else self._other, offset, length)
            if found.digest() != blob:
                return False
            for offset, length in other:
                data = os.pread(self._other, length, offset)
                self.write(offset, data, blake3(data).digest())
            os.fsync(self._data)
            self._part.rename(self.final)
            _sync_folder(self.final.parent)
            self._list.unlink()
            return True

    def close(self) -> None:
        if self._other >= 0:
            self._beside.unlink(missing_ok=True)
        for file in (self._data, self._log, self._other):
            if file >= 0:
                os.close(file)
        self._data = self._log = self._other = -1

    def _hash(self, offset: int, length: int) -> bytes:
        found = blake3()
        _hash_into(found, self._data, offset, length)
        return found.digest()


def _stretches(size: int, other: Collection[Place]) -> Iterator[tuple[bool, int, int]]:
    """Yield the ranges of a blob in order, each from the first version or the second."""
    at = 0
    for offset, length in sorted(other):
        if offset > at:
            yield True, at, offset - at
        yield False, offset, length
        at = offset + length
    if size > at:
        yield True, at, size - at


def _hash_into(found: blake3, file: int, offset: int, length: int) -> None:
    buffer = memoryview(bytearray(min(STEP, length)))
    end = offset + length
    while offset < end:
        count = os.preadv(file, [buffer[: end - offset]], offset)
        if not count:
            return  # the file is too short, so the hash will not match
        found.update(buffer[:count])
        offset += count


def _write(file: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def held_in(folder: Path, blob: bytes) -> Path | None:
    """Return the blob's file if it is in the folder and its hash is right."""
    path = folder / blob.hex()
    with boundary(StoreError, f"reading {path.name}"):
        if not path.is_file():
            return None
        with path.open("rb", buffering=0) as file:
            found = blake3()
            while data := file.read(STEP):
                found.update(data)
        if found.digest() == blob:
            return path
        path.unlink()
        return None
