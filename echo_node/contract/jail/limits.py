"""Resource limits of a jailed process: memory, CPU time, files, threads, no core.

Memory is limited as address space, the only limit that counts every kind of allocation; what
libraries have mapped and not touched so far is added on top. Deadlines are kept by the parent.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final

from echo_node.contract.jail import LayerError

_FILES: Final = 32  # open file descriptors
_THREADS: Final = 64


def set_limits(
    *, memory_bytes: int, untouched: int, cpu_seconds: int, own_users: bool, may_fork: bool
) -> None:
    """Set the limits, and check that the kernel took them.

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
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        soft = limit - 1 if kind == resource.RLIMIT_CPU else limit  # so that SIGXCPU names the cause
        resource.setrlimit(kind, (soft, limit))
    if any(resource.getrlimit(kind)[1] > most for kind, most in wanted.items()):
        raise LayerError("the kernel did not take every limit")


def memory() -> tuple[int, int]:
    """Return bytes resident, and bytes mapped but not resident; zeros where unknown."""
    if sys.platform != "linux":
        return 0, 0
    mapped, used, *_ = (int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split())
    return used, mapped - used
