"""Limits that the kernel keeps for a jailed process: memory, time of the processor, files, threads, no core.

Memory is limited as address space, which alone counts every way to get some; what libraries have mapped so far and not
touched is on top. It knows nothing of deadlines: those are the parent's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from echo_node.contract.jail.layer import LayerError

if sys.platform != "win32":
    import resource

    _FILES: Final = 32
    _THREADS: Final = 64

    def set_limits(
        *, memory_bytes: int, untouched: int, cpu_seconds: int, own_users: bool, may_fork: bool
    ) -> None:
        """Set what can be set. A limit of threads counts all of a user's, but for one in a namespace of its own."""
        wanted = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: cpu_seconds,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: _FILES,
        }
        if own_users:
            wanted[resource.RLIMIT_NPROC] = _THREADS
        elif may_fork:  # nothing else stands in the way
            wanted[resource.RLIMIT_NPROC] = 0
        if sys.platform == "linux":
            wanted[resource.RLIMIT_AS] = untouched + memory_bytes
            wanted[resource.RLIMIT_MEMLOCK] = 0
        for kind, most in wanted.items():
            _, hard = resource.getrlimit(kind)
            limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
            soft = limit - 1 if kind == resource.RLIMIT_CPU else limit  # so that its end says by what it came
            resource.setrlimit(kind, (soft, limit))
        if any(resource.getrlimit(kind)[1] > most for kind, most in wanted.items()):
            raise LayerError("the kernel has not taken all of them")

    def memory() -> tuple[int, int]:
        """Bytes that this process has taken so far, and those that it has mapped and not touched, where one can tell."""
        if sys.platform != "linux":
            return 0, 0
        mapped, used, *_ = (
            int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split()
        )
        return used, mapped - used
