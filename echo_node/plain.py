"""Opening what lies where a file should be. A pipe has its reader wait for as long as nobody writes, and a device has no end.

What cannot be used is an `OSError` that says so, for the caller's `boundary`. It knows nothing of what files hold.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from io import BufferedReader
from pathlib import Path
from typing import Final

PIPE_SECONDS: Final = 60.0
"""For whoever writes into a pipe that a person has named: another program may ask that person for something first."""
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # else the opening of a pipe waits already
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, ""),
)


def open_plain(path: Path) -> BufferedReader:
    """A file of our own, to be read. What is not one is left alone."""
    _check(path, path.stat().st_mode)  # the opening alone may do something to a device
    handle = os.open(path, _READ)
    try:
        _check(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_given(path: Path, most: int, *, line: bool = False) -> bytes:
    """What a person has named, up to so many bytes, or to the end of its first line: a file, or a pipe, such as that of the
    shell's `<(command)`, which has to say something within a while.
    """
    handle = os.open(path, _READ)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(handle).st_mode)
        os.set_blocking(handle, not is_pipe)
        until = time.monotonic() + PIPE_SECONDS
        data = b""
        while len(data) < most and not (line and b"\n" in data):
            if is_pipe:
                _wait(handle, path, until)
            piece = os.read(handle, most - len(data))
            if not piece:
                break
            data += piece
        return data
    finally:
        os.close(handle)


def _wait(handle: int, path: Path, until: float) -> None:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
        raise OSError(
            errno.ETIMEDOUT, f"it is a pipe, and nobody writes into it for {PIPE_SECONDS:g} s", str(path)
        )


def _check(path: Path, mode: int) -> None:
    kind = next((name for is_one, name in _KINDS if is_one(mode)), "a device")
    if kind:
        raise OSError(errno.EINVAL, f"it is {kind}, and no file", str(path))
