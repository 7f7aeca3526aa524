"""The folder in which a node keeps what it must not lose, used by one process at a time:

    key               who it is
    peers.sqlite      good peers, for the next start
    runs/ID/          what it holds of each run: weights, outbox, ledger, steps

It knows where things are, and nothing of what is in them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError, boundary
from echo_node.keyfile import load_or_create
from protocol import Identity

FORMAT: Final = 1
"""Of the folder. Another program's, or a newer one's, is left alone."""
_ADVICE: Final = "give another folder with --state"


@dataclass(frozen=True, slots=True)
class StateFolder:
    """What is where."""

    path: Path

    @property
    def book(self) -> Path:
        return self.path / "peers.sqlite"

    def identity(self) -> Identity:
        """The key of this node; made at the first start."""
        return load_or_create(self.path / "key")

    def run(self, run_id: bytes) -> Path:
        """The folder of a run, made if need be."""
        folder = self.path / "runs" / run_id.hex()
        with boundary(StoreError, f"making {folder}", advice=_ADVICE):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def prepared(path: Path) -> StateFolder:
    """The state in this folder, made if there is none. Nobody is kept out."""
    with boundary(StoreError, f"opening {path}", advice=_ADVICE):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = path / "format"
        if not mark.exists():
            if any(each.name not in {"key", "lock"} for each in path.iterdir()):
                raise StoreError(f"{path} holds something else than a node's state", advice=_ADVICE)
            mark.write_text(f"{FORMAT}\n")
        told = mark.read_text("utf-8", "replace").strip()
    if told != str(FORMAT):
        raise StoreError(
            f"{path} has the format {told[:20]!r}, this program writes {FORMAT}",
            advice="run the echo-node that wrote it, or give another folder with --state",
        )
    return StateFolder(path)


@contextmanager
def opened(path: Path) -> Generator[StateFolder]:
    """The state in this folder, for this process alone."""
    state = prepared(path)
    with boundary(StoreError, f"opening {path}", advice=_ADVICE):
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another node runs on {path}", advice="stop that one, or give this one a folder by --state"
            ) from None
        yield state
    finally:
        os.close(lock)
