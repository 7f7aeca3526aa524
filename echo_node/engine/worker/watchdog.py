"""Watchdog thread of an engine's process: heartbeats, memory ceiling, parent.

It ends the process when the memory ceiling is passed or the parent is gone, whatever the main
thread is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from typing import Final, NoReturn

from echo_node.engine.host_resources import reserved_memory, used_memory
from echo_node.runtime.ipc import Pipe, PipeError

OUT_OF_MEMORY: Final = 112
"""Exit code of a process that ran out of memory."""
PARENT_GONE: Final = 113
BEAT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.2
_PR_SET_PDEATHSIG: Final = 1


class Watchdog:
    """Beats while `busy`; watches always."""

    def __init__(self, pipe: Pipe, *, parent: int, memory_bytes: int | None) -> None:
        self._pipe = pipe
        self._parent = parent
        self._ceiling = memory_bytes
        self.busy = True
        """Whether a caller waits; heartbeats are sent only then."""

    def start(self) -> None:
        """Begin. The thread ends with the process."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        beat = 0.0
        while not self._pipe.ended(_LOOK_SECONDS) and os.getppid() == self._parent:
            used = used_memory()
            if self._ceiling is not None and used > self._ceiling:
                out_of_memory(f"{used >> 20} MiB are taken and {self._ceiling >> 20} MiB allowed")
            if self.busy and time.monotonic() >= beat + BEAT_SECONDS:
                beat = time.monotonic()
                with contextlib.suppress(PipeError):  # then the parent is gone, which is seen above
                    self._pipe.try_send({"kind": "beat", "memory": used})
        os._exit(PARENT_GONE)


def out_of_memory(how: str) -> NoReturn:
    """End this process for want of memory, and say so in its log."""
    sys.stderr.write(f"out of memory: {how}\n")
    sys.stderr.flush()
    os._exit(OUT_OF_MEMORY)


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent thread, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it exited before the signal was set
        os._exit(PARENT_GONE)


def limit_memory(memory_bytes: int) -> None:
    """Have the kernel, where it can, refuse allocations beyond the ceiling.

    Reserved but untouched memory counts, so the limit is what is reserved so far plus what is left
    to take.
    """
    reserved = reserved_memory()
    if reserved is not None:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = reserved + max(0, memory_bytes - used_memory())
        soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, most))
