"""Where a node listens to its person: a Unix socket in the state folder, however long the folder's path is.

An address of such a socket has room for about a hundred bytes; a long one is reached through a link in a folder of our own,
whose path is short even where that of temporary files is not.
It knows nothing of what is said there.
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
_ROOM: Final = 100
"""Bytes of an address that every system has room for."""
_SHORTEST: Final = "/tmp"  # noqa: S108 - what is made there is a folder that only its owner can open


@contextmanager
def listening(folder: Path) -> Generator[socket.socket]:
    """A socket that only the owner of the folder can call, until the block ends. The folder's lock must be ours: a socket
    that is there already is then a dead node's.
    """
    file = folder / NAME
    caught = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with caught:
        with boundary(StoreError, f"listening on {file}", advice="give another folder with --state"):
            file.unlink(missing_ok=True)
            with _short(folder) as address:
                caught.bind(address)
            file.chmod(0o600)  # nobody can call before it listens
            caught.listen(CALLERS)
        try:
            yield caught
        finally:
            file.unlink(missing_ok=True)


def called(folder: Path, seconds: float) -> socket.socket:
    """A connection to the node of this folder, with this deadline for each thing that is waited for. An `OSError` if nobody is there."""
    calling = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        calling.settimeout(seconds)
        with _short(folder) as address:
            calling.connect(address)
    except BaseException:
        calling.close()
        raise
    return calling


@contextmanager
def _short(folder: Path) -> Generator[str]:
    """An address of the socket in this folder that has room, for the time of the block."""
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
