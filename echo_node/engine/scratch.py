"""A folder for what an engine's process writes, which goes away with it however it ends.

Its owner holds a lock on it. A folder that nobody holds is left over from a process that was killed, and is swept by
whoever makes the next one. It knows nothing of what is written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from echo_node.errors import EngineError

_PREFIX: Final = "echo-engine-"
_TRIES: Final = 5


class Scratch:
    """One folder, from its making to its removal."""

    def __init__(self, beside: Path | None = None) -> None:
        around = Path(tempfile.gettempdir()) if beside is None else beside
        _sweep(around)
        try:
            self.path, self._lock = _make(around)
        except OSError as error:
            raise EngineError(
                f"no folder for the engine's files could be made in {around}: {error.strerror}",
                advice="free some space there, or set TMPDIR to another folder",
            ) from error

    def remove(self) -> None:
        """Take it away, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make(around: Path) -> tuple[Path, int | None]:
    """A new folder and the lock on it. Somebody who sweeps may take it before it is locked: then another."""
    for left in reversed(range(_TRIES)):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around))
        try:
            lock = _hold(folder)
        except OSError:
            if not left:
                raise
            continue
        if folder.is_dir():
            return folder, lock
        os.close(lock)
    raise FileNotFoundError(errno.ENOENT, "it is swept away every time")


def _sweep(around: Path) -> None:
    """Remove what killed processes have left there. What is somebody else's, or in use, stays."""
    for folder in around.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = _hold(folder)
        except OSError:  # gone already, in use, or not ours to open
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _hold(folder: Path) -> int:
    """Lock a folder as long as the descriptor is open; an `OSError` if somebody else does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
