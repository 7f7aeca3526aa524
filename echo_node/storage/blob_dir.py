"""Folder of immutable blobs, each a file named by the hex of its hash.

A blob in it is complete: downloads write drafts beside it (`net/blobs`), and the blob server reads
from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from echo_node.errors import StoreError
from echo_node.net.blobs.blob_registry import InFile
from echo_node.storage import files
from protocol import blob_id, limits

log = logging.getLogger(__name__)
_HEX = 64
"""Characters of a hash in hex."""


class DamagedBlobError(StoreError):
    """A blob file with other bytes than its hash says.

    It was removed, to be fetched again.
    """


class BlobDir:
    """Blobs of a store."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder = folder
        self._durable = durable
        self.lost = 0
        """Damaged files removed so far."""

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
        """Return the blob as a file to serve; None if it is missing."""
        size = self.size(blob)
        return None if size is None else InFile(self.path(blob), size)

    def put(self, data: bytes | memoryview) -> bytes:
        """Write bytes as a blob and return its hash. `sync` makes the name durable."""
        blob = blob_id(data)  # type: ignore[arg-type] # any buffer will do
        if self.size(blob) != len(data):
            files.write_whole(self.path(blob), data, durable=self._durable)
        return blob

    def sync(self) -> None:
        """Make the names of all blobs written so far durable."""
        files.sync_folder(self.folder, durable=self._durable)

    def read(self, blob: bytes, most: int = limits.FRAME_BYTES) -> bytes:
        """Return the bytes of a blob and check their hash; a damaged file is removed."""
        data = files.read_whole(self.path(blob), most)
        if blob_id(data) != blob:
            files.remove(self.path(blob))
            self.lost += 1
            log.warning("%s is damaged, and taken away, so that it is fetched again", self.path(blob).name)
            raise DamagedBlobError(
                f"{self.path(blob).name} is damaged: its bytes have another hash",
                advice="it is taken away; join again, and it is fetched",
            )
        return data

    def is_right(self, blob: bytes, most: int = limits.FRAME_BYTES) -> bool:
        """Return whether the bytes of a blob have its hash. Changes nothing."""
        return blob_id(files.read_whole(self.path(blob), most)) == blob

    def read_part(self, blob: bytes, offset: int, into: memoryview) -> None:
        """Read a part of a blob into a buffer, without a hash check."""
        path = self.path(blob)
        with files.disk_errors(f"reading {path.name}"):
            handle = files.open_file(path, os.O_RDONLY)
            try:
                files.read_at(handle, offset, into)
            finally:
                os.close(handle)

    def all(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over complete blobs and their sizes."""
        for path, blob in self._files():
            if len(path.name) == _HEX:
                yield blob, path.stat().st_size

    def drafts(self) -> Iterator[tuple[bytes, Path]]:
        """Iterate over partial files, by the blob that each will become."""
        for path, blob in self._files():
            if len(path.name) > _HEX:
                yield blob, path

    def _files(self) -> list[tuple[Path, bytes]]:
        with files.disk_errors(f"reading {self.folder.name}"):
            return [(path, blob) for path in self.folder.iterdir() if (blob := _named(path.name))]

    def tidy(self) -> None:
        """Remove partial files that no download resumes.

        These are temporary files of an ended process, and drafts of blobs that are complete.
        """
        for blob, path in self.drafts():
            resumable = path.name in {f"{blob.hex()}.part", f"{blob.hex()}.pieces"}
            if not resumable or self.has(blob):
                files.remove(path)


def _named(name: str) -> bytes | None:
    """Return the blob that a file is named after; None for other files."""
    try:
        return bytes.fromhex(name[:_HEX]) if len(name) >= _HEX else None
    except ValueError:
        return None
