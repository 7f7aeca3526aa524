"""The jail of macOS: a profile in the language of `sandbox-exec`, which the process puts on itself once the contract's
code is there, and a thread that ends it when it takes too much memory or its parent is gone.

Written from the system's documentation and not tried on a machine by those who wrote it: `layers()` shows what holds.
It knows nothing of contracts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from echo_node.contract.jail.layer import LayerError

OUT_OF_MEMORY: Final = 112
PARENT_GONE: Final = 113
_LOOK_SECONDS: Final = 0.2
_RULES: Final = """(version 1)
(deny default)
(allow sysctl-read)
(allow mach-lookup (global-name "com.apple.system.logger"))
(allow signal (target self))
(allow process-info* (target self))
(allow file-read-metadata)
(allow file-read* (literal "/dev/urandom") (literal "/dev/null") (subpath "/usr/lib") (subpath "/System/Library"))
"""


def profile(readable: Iterable[Path]) -> str:
    """No network, no other process, no writing, and reading beneath these paths alone."""
    lines = [f"(allow file-read* (subpath {_quoted(str(path.resolve()))}))\n" for path in readable]
    return _RULES + "".join(lines)


def restrict(readable: Iterable[Path]) -> None:
    """Put the profile on this process, for good."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "sandbox_init"):
        raise LayerError("this system has no sandbox_init")
    told = ctypes.c_char_p()
    if library.sandbox_init(profile(readable).encode(), ctypes.c_uint64(0), ctypes.byref(told)):
        raise LayerError((told.value or b"the system refused the profile").decode(errors="replace"))
    with contextlib.suppress(PermissionError):
        os.listdir("/")  # noqa: PTH208 -- the plainest look at what must be out of sight
        raise LayerError("the root folder can still be listed")


def watch(parent: int, memory_bytes: int) -> None:
    """Start the thread that ends this process when it should not live on."""

    def look() -> None:
        while os.getppid() == parent:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes here, on Linux kilobytes
            if used * (1 if sys.platform == "darwin" else 1024) > memory_bytes:
                os._exit(OUT_OF_MEMORY)
            time.sleep(_LOOK_SECONDS)
        os._exit(PARENT_GONE)

    threading.Thread(target=look, name="jail watch", daemon=True).start()


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
