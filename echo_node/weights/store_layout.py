"""Folder of a store: paths, the lock against a second process, and the pointer."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from echo_node.errors import StoreError
from echo_node.storage import files
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.state_file import StateFile
from protocol.digest import DIGEST_BYTES

_OTHER = "other-"
"""Prefix of temporary state files."""


class StoreLayout:
    """Folder that this process has for itself."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._folder = folder
        self._durable = durable
        self.blobs = folder / "blobs"
        self.heads = folder / "heads"
        self.lent = folder / "lent"
        self.state = folder / "state"
        self._current = folder / "current"

    @classmethod
    @contextmanager
    def locked(cls, folder: Path, *, durable: bool) -> Generator[StoreLayout]:
        """Make and lock the folder, and remove what an ended process left unfinished."""
        place = cls(folder, durable=durable)
        with files.disk_errors(f"opening {folder}"):
            for each in (place.blobs, place.heads, place.lent):
                each.mkdir(parents=True, exist_ok=True)
            handle = files.open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{place} is in use by another process",
                    advice="stop that one, or give this one another folder",
                ) from None
            with files.disk_errors(f"opening {folder}"):
                place._tidy()
            # What is found from now on has to last.
            for each in (place.blobs, place.heads, place.lent, folder):
                files.sync_folder(each, durable=durable)
            yield place
        finally:
            os.close(handle)

    def current(self) -> bytes | None:
        """Return the head of the active version that the pointer names."""
        if not self._current.exists():
            return None
        text = files.read_whole(self._current, 3 * DIGEST_BYTES)
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError:
            raise StoreError(f"{self._current} names no head", advice="move the store away") from None

    def flip(self, head_id: bytes) -> None:
        """Point to another head, atomically."""
        files.write_whole(self._current, f"{head_id.hex()}\n".encode(), durable=self._durable)
        files.sync_folder(self._folder, durable=self._durable)

    @contextmanager
    def another_state(self, flat: FlatLayout) -> Generator[StateFile]:
        """Open a temporary state file, removed afterwards."""
        path = self._folder / f"{_OTHER}{secrets.token_hex(4)}"
        try:
            state_file = StateFile(path, flat, durable=False)
            try:
                yield state_file
            finally:
                state_file.close()
        finally:
            files.remove(path)

    def _tidy(self) -> None:
        for path in (*self._folder.iterdir(), *self.heads.iterdir()):
            if path.suffix == files.BESIDE or path.name.startswith(_OTHER):
                files.remove(path)

    def __str__(self) -> str:
        return f"the store {self._folder}"
