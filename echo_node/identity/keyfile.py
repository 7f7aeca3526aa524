"""Key file of a node: created once, never overwritten, owner-readable only."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError, boundary
from echo_node.storage.files import open_plain
from protocol import Identity
from protocol.identity import KEY_BYTES

ADVICE: Final = "it is this node's identity: restore it from a copy, or move it away to start with a new one"


def load_or_create(file: Path) -> Identity:
    """Load the key from the file, or create it durably if there is no file."""
    with boundary(StoreError, f"reading the key {file}", advice=ADVICE):
        if not file.exists():
            _create(file)
    return load(file)


def load(file: Path) -> Identity:
    """Load the key from the file."""
    with boundary(StoreError, f"reading the key {file}", advice=ADVICE), open_plain(file) as opened:
        mode = os.fstat(opened.fileno()).st_mode & 0o777
        seed = opened.read(KEY_BYTES + 1)
        size = max(os.fstat(opened.fileno()).st_size, len(seed))
    if size != KEY_BYTES:
        raise StoreError(f"{file} holds {size} bytes and a key has {KEY_BYTES}", advice=ADVICE)
    if mode & 0o077:
        raise StoreError(
            f"other people on this machine can read the key {file} (its mode is {mode:o})",
            advice=f"if nobody has, chmod 600 {file}; else move it away and start with a new key",
        )
    return Identity(seed)


def restore(file: Path, identity: Identity, *, replace: bool) -> Path | None:
    """Write a restored key into the file.

    If `replace`, another key in that place is kept under a new name, which is returned; else it
    is an error.
    """
    with boundary(StoreError, f"writing the key {file}", advice="check free space and permissions"):
        there = file.exists()
        if there:
            with open_plain(file) as opened:
                is_same = opened.read(KEY_BYTES + 1) == identity.seed
            if is_same:
                file.chmod(0o600)
                return None
        if there and not replace:
            raise StoreError(
                f"{file} is another key already",
                advice="give --replace to keep that one beside it under another name, or another folder by --state",
            )
        old = _free_name(file) if there else None
        draft = _draft(file, identity)
        try:
            if old is not None:
                os.link(file, old)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        _sync(file.parent)
    return old


def _free_name(file: Path) -> Path:
    stem = f"{file.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (file.with_name(stem + (f"-{again}" if again else "")) for again in range(1000))
    return next(name for name in names if not name.exists())


def _create(file: Path) -> None:
    """Create the key file atomically: write beside it, sync, link.

    The link fails if another process was first.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(file, Identity.generate())
    try:
        os.link(draft, file)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    _sync(file.parent)


def _draft(file: Path, identity: Identity) -> Path:
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, identity.seed)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return draft


def _sync(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
