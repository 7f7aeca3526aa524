"""A node's key on disk: made once, never overwritten, readable by its owner alone. Knows nothing of what it signs."""

from __future__ import annotations

import os
from pathlib import Path

from echo_node.errors import StoreError, boundary
from protocol import Identity
from protocol.identity import KEY_BYTES

ADVICE = "it is this node's identity: restore it from a copy, or move it away to begin as somebody new"


def load_or_create(file: Path) -> Identity:
    """The key in the file; a new one, safely on disk, if there is no file yet."""
    with boundary(StoreError, f"reading the key {file}", advice=ADVICE):
        if not file.exists():
            _create(file)
        seed = file.read_bytes()
    if len(seed) != KEY_BYTES:
        raise StoreError(f"{file} holds {len(seed)} bytes and a key has {KEY_BYTES}", advice=ADVICE)
    return Identity(seed)


def _create(file: Path) -> None:
    """Write beside it, sync, and link it to its name, which fails if another process was first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, Identity.generate().seed)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, file)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
