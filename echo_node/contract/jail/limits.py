"""Resource limits of a jailed process: memory, CPU time, files, threads, no core.

Memory is limited as address space, the only limit that counts every kind of allocation; what
libraries have mapped and not touched so far is added on top. Deadlines are kept by the parent.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Final

from echo_node.contract.jail import LayerError

_FILES: Final = 32  # open file descriptors
_THREADS: Final = 64


def set_limits(
    *, memory_bytes: int, untouched: int, cpu_seconds: int, own_users: bool, may_fork: bool
) -> None:
    """Set the limits, and check that the kernel took them.

    Later calls can only lower them.

    A limit of threads counts all threads of a user, except in a user namespace of its own.
    """
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _FILES,
    }
    if own_users:
        wanted[resource.RLIMIT_NPROC] = _THREADS
    elif may_fork:  # no other layer forbids it
        wanted[resource.RLIMIT_NPROC] = 0
    if sys.platform == "linux":
        wanted[resource.RLIMIT_AS] = untouched + memory_bytes
        wanted[resource.RLIMIT_MEMLOCK] = 0
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        soft = limit - 1 if kind == resource.RLIMIT_CPU else limit  # so that SIGXCPU names the cause
        resource.setrlimit(kind, (soft, limit))
    if any(resource.getrlimit(kind)[1] > most for kind, most in wanted.items()):
        raise LayerError("the kernel did not take every limit")


class Usage:
    """This process's memory and threads, also once `/proc` can no longer be opened."""

    def __init__(self) -> None:
        self._stat = (
            os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else None
        )

    def read(self) -> tuple[int, int, int]:
        """Return bytes resident, bytes only mapped, and threads; 0 where unknown."""
        if self._stat is None:
            return 0, 0, 0
        fields = os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()  # from the third field on
        threads, mapped = int(fields[17]), int(fields[20])
        used = int(fields[21]) * resource.getpagesize()
        return used, mapped - used, threads

    def close(self) -> None:
        """Close the file."""
        if self._stat is not None:
            os.close(self._stat)
            self._stat = None
