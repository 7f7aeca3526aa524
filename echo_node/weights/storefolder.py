"""The folder of a store: what is where in it, the lock that keeps a second process out, and the pointer that flips.

It knows which version is current by its name alone, and nothing of what a version is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from echo_node.errors import StoreError
from echo_node.weights import disk
from echo_node.weights.flat import FlatLayout
from echo_node.weights.scratch import Scratch
from protocol.digest import DIGEST_BYTES

_OTHER = "other-"
"""How the names of states begin that are built beside the one that is held."""


class StoreFolder:
    """A folder that this process has for itself."""

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
    def locked(cls, folder: Path, *, durable: bool) -> Generator[StoreFolder]:
        """Make the folder if need be, lock it, and remove what a process that ended has left half-done."""
        place = cls(folder, durable=durable)
        with disk.touching(f"opening {folder}"):
            for each in (place.blobs, place.heads, place.lent):
                each.mkdir(parents=True, exist_ok=True)
            handle = disk.open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{place} is in use by another process",
                    advice="stop that one, or give this one another folder",
                ) from None
            with disk.touching(f"opening {folder}"):
                place._tidy()
            # What is found from now on has to last.
            for each in (place.blobs, place.heads, place.lent, folder):
                disk.sync_folder(each, durable=durable)
            yield place
        finally:
            os.close(handle)

    def current(self) -> bytes | None:
        """The head whose state is held."""
        if not self._current.exists():
            return None
        told = disk.read_whole(self._current, 3 * DIGEST_BYTES)
        try:
            return bytes.fromhex(told.decode("ascii"))
        except ValueError:
            raise StoreError(f"{self._current} names no head", advice="move the store away") from None

    def flip(self, head_id: bytes) -> None:
        """From one moment to the next, another version is held."""
        disk.write_whole(self._current, f"{head_id.hex()}\n".encode(), durable=self._durable)
        disk.sync_folder(self._folder, durable=self._durable)

    @contextmanager
    def another_state(self, flat: FlatLayout) -> Generator[Scratch]:
        """A file for another state, which is gone afterwards."""
        path = self._folder / f"{_OTHER}{secrets.token_hex(4)}"
        try:
            scratch = Scratch(path, flat, durable=False)
            try:
                yield scratch
            finally:
                scratch.close()
        finally:
            disk.remove(path)

    def _tidy(self) -> None:
        for path in (*self._folder.iterdir(), *self.heads.iterdir()):
            if path.suffix == disk.BESIDE or path.name.startswith(_OTHER):
                disk.remove(path)

    def __str__(self) -> str:
        return f"the store {self._folder}"
