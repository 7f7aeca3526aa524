"""Unix control socket in the state folder, however long the folder's path is.

The address of such a socket has room for about a hundred bytes; a longer path is reached through a
symbolic link in a private temporary folder with a short path.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError, boundary

NAME: Final = "control"
CALLERS: Final = 16
"""Concurrent connections."""
_ROOM: Final = 100
"""Bytes of a socket address that every system accepts."""
_SHORTEST: Final = "/tmp"  # noqa: S108 - what is made there is a folder that only its owner can open


@contextmanager
def listen(folder: Path) -> Generator[socket.socket]:
    """Listen on the control socket, which only the folder's owner can connect to.

    The caller must hold the folder's lock: a socket that exists already is then a dead node's.
    """
    file = folder / NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        with boundary(StoreError, f"listening on {file}", advice="give another folder with --state"):
            file.unlink(missing_ok=True)
            with _short(folder) as address:
                listener.bind(address)
            file.chmod(0o600)  # nobody can connect before it listens
            listener.listen(CALLERS)
        try:
            yield listener
        finally:
            file.unlink(missing_ok=True)


def connect(folder: Path, seconds: float) -> socket.socket:
    """Connect to the node of this folder, with a timeout per operation.

    Raises `OSError` if no node listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with _short(folder) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _short(folder: Path) -> Generator[str]:
    """Yield an address of the folder's socket short enough to bind, for the block."""
    direct = str(folder / NAME)
    if len(os.fsencode(direct)) <= _ROOM:
        yield direct
        return
    usual = tempfile.gettempdir()
    place = usual if len(os.fsencode(usual)) <= _ROOM // 2 else _SHORTEST
    with tempfile.TemporaryDirectory(prefix="echo-", dir=place) as passing:
        link = Path(passing, "s")
        link.symlink_to(folder.absolute())
        yield str(link / NAME)
