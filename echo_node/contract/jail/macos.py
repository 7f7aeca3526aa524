"""macOS layers: a `sandbox_init` profile and a memory and parent watchdog.

The process applies the profile to itself once the contract's code is imported; the thread ends it
when it takes too much memory or its parent is gone. Written from the system's documentation and not
yet tried on a Mac: `layers()` reports what holds.
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

from echo_node.contract.jail import LayerError

OUT_OF_MEMORY: Final = 112
"""Exit code of a process that took too much memory."""
PARENT_GONE: Final = 113
"""Exit code of a process whose parent is gone."""
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
    """Return a sandbox profile that allows reading beneath these paths only.

    It forbids the network, processes and writing.
    """
    lines = [f"(allow file-read* (subpath {_quoted(str(path.resolve()))}))\n" for path in readable]
    return _RULES + "".join(lines)


def restrict(readable: Iterable[Path]) -> None:
    """Apply the profile to this process, permanently."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "sandbox_init"):
        raise LayerError("this system has no sandbox_init")
    message = ctypes.c_char_p()
    if library.sandbox_init(profile(readable).encode(), ctypes.c_uint64(0), ctypes.byref(message)):
        raise LayerError((message.value or b"the system refused the profile").decode(errors="replace"))
    with contextlib.suppress(PermissionError):
        os.listdir("/")  # noqa: PTH208 -- the plainest test that the profile holds
        raise LayerError("the root folder can still be listed")


def watch(parent: int, memory_bytes: int) -> None:
    """Start the thread that ends this process on too much memory or a missing parent."""

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
