"""Permission for forks of a jailed process, decided by the node one by one.

The kernel asks the node before each of them. The descriptor is that of `seccomp.listen`. One fork
is allowed per text, of the process itself; every other one fails there with EPERM, so that a
contract leaves no process behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from typing import Final

_RECEIVE: Final = 0xC050_2100  # SECCOMP_IOCTL_NOTIF_RECV
_SEND: Final = 0xC018_2101  # SECCOMP_IOCTL_NOTIF_SEND
_QUESTION: Final = struct.Struct("=QII64x")  # id, pid, flags; then struct seccomp_data
_ANSWER: Final = struct.Struct("=QqiI")  # id, value, error, flags
_CONTINUE: Final = 1


class ForkPermits:
    """Answers to the forks of one jailed process."""

    def __init__(self, descriptor: int, process: int) -> None:
        self._descriptor = descriptor
        self._process = process
        self.left = 0
        """Forks that the process may still make."""

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._descriptor

    def answer(self) -> None:
        """Answer the fork that waits, if one still does."""
        question = bytearray(_QUESTION.size)
        with suppress(OSError):  # the process that asked has ended
            fcntl.ioctl(self._descriptor, _RECEIVE, question)
            id_, process, _ = _QUESTION.unpack(question)
            allowed = process == self._process and self.left > 0
            self.left -= allowed
            error, flags = (0, _CONTINUE) if allowed else (-errno.EPERM, 0)
            fcntl.ioctl(self._descriptor, _SEND, _ANSWER.pack(id_, 0, error, flags))

    def close(self) -> None:
        """Give the descriptor up: forks then fail there with ENOSYS."""
        os.close(self._descriptor)
