"""Detect impure code in a block: clock, randomness, files, sockets, compile.

Seeded randomness is pure. Uses the interpreter's profile and audit events, so nothing is replaced.
It informs authors; it is no protection.
"""

from __future__ import annotations

import datetime as dt
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType
from typing import Any, Final

CODE: Final = "__import__('os').mkdir('echo-contract-ran-this')"
_MARK: Final = "echo-contract-ran-this"
_CLOCKS: Final = frozenset(
    """
    time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time
    thread_time_ns localtime gmtime ctime sleep
    """.split()  # noqa: SIM905 -- a list as people read it
)
_NOW: Final = frozenset({"now", "utcnow", "today"})
_OUTSIDE: Final = (
    "open",
    "os.",
    "socket.",
    "subprocess.",
    "shutil.",
    "tempfile.",
    "ctypes.dlopen",
    "urllib.",
)
_SEED: Final = random.Random.seed.__code__
_listeners: list[dict[str, set[str]]] = []


@contextmanager
def watch() -> Iterator[dict[str, set[str]]]:
    """Record impure uses by kind: `clock`, `luck`, `code` and `outside`.

    `code` is a completion that was compiled.
    """
    seen: dict[str, set[str]] = {"clock": set(), "luck": set(), "code": set(), "outside": set()}
    if not _hooked:
        sys.addaudithook(_heard)  # for the rest of the process: there is no way to take one off
        _hooked.append(True)

    def profile(frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            _called(what, seen)
        elif event == "call" and frame.f_code is _SEED and frame.f_locals.get("a") is None:
            seen["luck"].add("random.Random without a seed")

    _listeners.append(seen)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        _listeners.remove(seen)


_hooked: list[bool] = []


def _called(what: BuiltinFunctionType, seen: dict[str, set[str]]) -> None:
    owner, name = getattr(what, "__self__", None), what.__name__
    if owner is time and name in _CLOCKS:
        seen["clock"].add(f"time.{name}")
    elif isinstance(owner, type) and issubclass(owner, dt.date) and name in _NOW:
        seen["clock"].add(f"{owner.__name__}.{name}")
    elif owner is random._inst:  # noqa: SLF001 -- the one that `random.random` and its like share
        seen["luck"].add("the random module, which nobody has seeded")
    elif name in {"urandom", "getrandom"}:
        seen["luck"].add(f"os.{name}")


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _listeners:
        return
    seen = _listeners[-1]
    if event == "compile":
        source = args[0].decode("utf-8", "replace") if isinstance(args[0], bytes) else str(args[0])
        if _MARK in source:
            seen["code"].add("the text of a completion was compiled as Python")
    elif event.startswith(_OUTSIDE):
        seen["outside"].add(event if event != "open" else f"open {str(args[0])[:80]!r}")
