"""Safe file operations: atomic whole files, positional reads and writes. Blocks.

A whole file is written beside its place, synced and renamed, so that a reader finds all of it or
none. With `durable` off it is not synced.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeAlias

from echo_node.errors import StoreError, boundary

Buffer: TypeAlias = bytes | bytearray | memoryview
BESIDE: Final = ".beside"
"""Suffix of a temporary file that is renamed when complete."""
_ADVICE: Final = "see whether there is room on the disk, and whether it may be written to"


@contextmanager
def disk_errors(what: str) -> Generator[None]:
    """Turn an `OSError` into a `StoreError` with advice about the disk."""
    with boundary(StoreError, what, advice=_ADVICE):
        yield


def write_whole(path: Path, data: Buffer, *, durable: bool) -> None:
    """Write a file atomically. Its name is durable once its folder is synced."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{BESIDE}")
    with disk_errors(f"writing {path.name}"):
        try:
            handle = open_file(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_at(handle, 0, data)
                if durable:
                    sync(handle)
            finally:
                os.close(handle)
            rename(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def open_file(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o644)


def rename(source: Path, target: Path) -> None:
    source.rename(target)


def unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file. A power cut may bring it back until its folder is synced."""
    with disk_errors(f"removing {path.name}"):
        unlink(path)


def write_at(handle: int, offset: int, data: Buffer) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def read_at(handle: int, offset: int, into: memoryview) -> None:
    """Fill the buffer from an offset; raise if the file is too short."""
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], offset + done)
        if not count:
            raise StoreError("a file is shorter than it was")
        done += count


def read_whole(path: Path, most: int) -> bytes:
    """Return the bytes of a file of at most `most` bytes."""
    with disk_errors(f"reading {path.name}"), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise StoreError(f"{path.name} has {size} bytes, of at most {most}")
        data = bytearray(size)
        read_at(file.fileno(), 0, memoryview(data))
        return bytes(data)


def allocate(handle: int, size: int) -> None:
    """Reserve disk space now.

    Writing to a mapped file without space would kill the process.
    """
    os.ftruncate(handle, size)
    if size:
        os.posix_fallocate(handle, 0, size)


def sync(handle: int) -> None:
    os.fsync(handle)


def sync_folder(folder: Path, *, durable: bool) -> None:
    """Make the names in a folder durable."""
    if not durable:
        return
    with disk_errors(f"syncing {folder.name}"):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync(handle)
        finally:
            os.close(handle)


PIPE_SECONDS: Final = 60.0
"""Seconds to wait for a pipe given by the user: its writer may prompt the user first."""
# O_NONBLOCK: opening a pipe without a writer would wait
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, ""),
)


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file of the node to read it; refuse anything else."""
    _check(path, path.stat().st_mode)  # the opening alone may do something to a device
    handle = os.open(path, _READ)
    try:
        _check(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_given(path: Path, most: int, *, line: bool = False) -> bytes:
    """Read a file or pipe given by the user, up to a size or its first line's end.

    A pipe, such as the shell's `<(command)`, must deliver within `PIPE_SECONDS`.
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
