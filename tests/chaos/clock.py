"""Control of a node's wall clock and disk speed.

A shim in C is loaded into the node's processes, and reads from a page of memory what the harness
writes there while they run.

It knows nothing of nodes: it gives an environment to start one with.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("clockshim.c")
_PAGE: Final = struct.Struct("=3q")


def build_shim(folder: Path) -> Path:
    """The shim, compiled. Raises CalledProcessError with what the compiler said."""
    made = folder / "clockshim.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return made


class Clock:
    """Clock and disk speed of one node.

    A setting holds at once, for all of the node's processes, also for those that start later.
    """

    def __init__(self, shim: Path, page: Path) -> None:
        page.write_bytes(bytes(4096))
        self.environment = {"LD_PRELOAD": str(shim), "ECHO_CHAOS_PAGE": str(page)}
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 4096)
        self._seconds = 0.0
        self._slow = 0.0, 0.0

    def jump(self, seconds: float) -> None:
        """The wall clock is off by so much, from now on."""
        self._seconds = seconds
        self._write()

    def slow(self, *, sync: float = 0.0, write: float = 0.0) -> None:
        """Each fsync, and each write to a file, takes so many seconds longer."""
        self._slow = sync, write
        self._write()

    def close(self) -> None:
        self._page.close()

    def _write(self) -> None:
        sync, write = self._slow
        values = int(self._seconds * 1e9), int(sync * 1e6), int(write * 1e6)
        self._page[: _PAGE.size] = _PAGE.pack(*values)
