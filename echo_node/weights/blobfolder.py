"""A folder of blobs, each a file under the hex of its hash that never changes. What is there is whole.

Downloads write straight into it (`net/blobs`), and the shelf serves from it. It knows no heads and no tables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from echo_node.errors import StoreError
from echo_node.net.blobs.shelf import InFile
from echo_node.weights import disk
from protocol import blob_id, limits

log = logging.getLogger(__name__)
_HEX = 64
"""Characters of a hash."""


class DamagedBlobError(StoreError):
    """A file has other bytes than once were written. It is taken away, so that the blob is missing, and can be fetched."""


class BlobFolder:
    """The blobs of a store."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder = folder
        self._durable = durable
        self.lost = 0
        """Files that were taken away since they were damaged."""

    def path(self, blob: bytes) -> Path:
        return self.folder / blob.hex()

    def has(self, blob: bytes) -> bool:
        return self.size(blob) is not None

    def size(self, blob: bytes) -> int | None:
        try:
            return self.path(blob).stat().st_size
        except FileNotFoundError:
            return None

    def held(self, blob: bytes) -> InFile | None:
        """What the shelf needs to serve it."""
        size = self.size(blob)
        return None if size is None else InFile(self.path(blob), size)

    def put(self, data: bytes | memoryview) -> bytes:
        """Keep some bytes, and say what they are called. `sync` makes the name last."""
        blob = blob_id(data)  # type: ignore[arg-type] # any buffer will do
        if self.size(blob) != len(data):
            disk.write_whole(self.path(blob), data, durable=self._durable)
        return blob

    def sync(self) -> None:
        """Make every name last that was put until now."""
        disk.sync_folder(self.folder, durable=self._durable)

    def read(self, blob: bytes, most: int = limits.FRAME_BYTES) -> bytes:
        """The bytes, hashed again. A file that has others is no blob, and is here no longer."""
        data = disk.read_whole(self.path(blob), most)
        if blob_id(data) != blob:
            disk.remove(self.path(blob))
            self.lost += 1
            log.warning("%s is damaged, and taken away, so that it is fetched again", self.path(blob).name)
            raise DamagedBlobError(
                f"{self.path(blob).name} is damaged: its bytes have another hash",
                advice="it is taken away; join again, and it is fetched",
            )
        return data

    def is_right(self, blob: bytes, most: int = limits.FRAME_BYTES) -> bool:
        """Whether the bytes are what they are called. Nothing is changed."""
        return blob_id(disk.read_whole(self.path(blob), most)) == blob

    def read_part(self, blob: bytes, offset: int, into: memoryview) -> None:
        """Some bytes of one, not hashed."""
        path = self.path(blob)
        with disk.touching(f"reading {path.name}"):
            handle = disk.open_file(path, os.O_RDONLY)
            try:
                disk.read_at(handle, offset, into)
            finally:
                os.close(handle)

    def all(self) -> Iterator[tuple[bytes, int]]:
        """Every whole blob and its size."""
        for path, blob in self._files():
            if len(path.name) == _HEX:
                yield blob, path.stat().st_size

    def drafts(self) -> Iterator[tuple[bytes, Path]]:
        """Files that are not blobs yet: what a download can go on from, by the blob that it is to be."""
        for path, blob in self._files():
            if len(path.name) > _HEX:
                yield blob, path

    def _files(self) -> list[tuple[Path, bytes]]:
        with disk.touching(f"reading {self.folder.name}"):
            return [(path, blob) for path in self.folder.iterdir() if (blob := _named(path.name))]

    def tidy(self) -> None:
        """Remove what nobody will go on from: files written beside by a process that ended, drafts of what is whole."""
        for blob, path in self.drafts():
            resumable = path.name in {f"{blob.hex()}.part", f"{blob.hex()}.pieces"}
            if not resumable or self.has(blob):
                disk.remove(path)


def _named(name: str) -> bytes | None:
    """The blob that a file is called after; none, if it is somebody else's."""
    try:
        return bytes.fromhex(name[:_HEX]) if len(name) >= _HEX else None
    except ValueError:
        return None
