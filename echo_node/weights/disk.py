"""Every touch of the disk that the weights make: whole files that appear at once, and bytes at a place. Blocks.

A file that appears is written beside its place, synced and renamed there, so that whoever looks finds all of it or
none. Where nothing is worth keeping (`durable` is off), it is not synced. It knows nothing of what is in the files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from echo_node.errors import StoreError, boundary

Buffer: TypeAlias = bytes | bytearray | memoryview
BESIDE: Final = ".beside"
"""How the name of a file ends that is not yet what it will be."""
_ADVICE: Final = "see whether there is room on the disk, and whether it may be written to"


@contextmanager
def touching(what: str) -> Generator[None]:
    """What goes wrong here is the disk's fault."""
    with boundary(StoreError, what, advice=_ADVICE):
        yield


def write_whole(path: Path, data: Buffer, *, durable: bool) -> None:
    """The file, from one moment to the next. Its name lasts only once its folder is synced."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{BESIDE}")
    with touching(f"writing {path.name}"):
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
    """Have the file gone. It may come back with a power cut, as long as its folder is not synced."""
    with touching(f"removing {path.name}"):
        unlink(path)


def write_at(handle: int, offset: int, data: Buffer) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def read_at(handle: int, offset: int, into: memoryview) -> None:
    """Fill the buffer, or say that the file is too short."""
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], offset + done)
        if not count:
            raise StoreError("a file is shorter than it was")
        done += count


def read_whole(path: Path, most: int) -> bytes:
    """A file of at most so many bytes."""
    with touching(f"reading {path.name}"), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise StoreError(f"{path.name} has {size} bytes, of at most {most}")
        data = bytearray(size)
        read_at(file.fileno(), 0, memoryview(data))
        return bytes(data)


def allocate(handle: int, size: int) -> None:
    """Room for so many bytes, all of it now: a mapped file without room would end the process when it is written."""
    os.ftruncate(handle, size)
    if size:
        os.posix_fallocate(handle, 0, size)


def sync(handle: int) -> None:
    os.fsync(handle)


def sync_folder(folder: Path, *, durable: bool) -> None:
    """Make the names in a folder last."""
    if not durable:
        return
    with touching(f"syncing {folder.name}"):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync(handle)
        finally:
            os.close(handle)
