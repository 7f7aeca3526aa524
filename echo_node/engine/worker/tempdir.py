"""Temporary directory of an engine's process, removed however the process ends.

Its owner holds a lock on it. A directory without a lock is left over from a process that was
killed, and is removed when the next one is made.
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


class WorkerTempDir:
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
    """Make and lock a new directory; retry if a sweep removes it before it is locked."""
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
    """Remove what killed processes have left there.

    What is somebody else's, or in use, stays.
    """
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
    """Lock a folder while the descriptor is open; `OSError` if locked by another."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
