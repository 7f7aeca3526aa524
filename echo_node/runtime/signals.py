"""SIGINT and SIGTERM outside of the event loop: one line and the usual exit code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C."""
TERMINATED: Final = 143
"""Exit code after SIGTERM, where that does not stop a node in order."""
_LINE: Final = b"echo-node: stopped\n"


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """End the process at once on SIGINT or SIGTERM, for the time of imports.

    An exception in the middle of an import can abort the process, and nothing is lost yet.
    """

    def stop(number: int, _frame: object) -> None:
        _end(TERMINATED if number == signal.SIGTERM else INTERRUPTED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the block is done, such as a clean-up."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class SigtermFlag:
    """Record of whether SIGTERM has been received."""

    received = False


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[SigtermFlag]:
    """Handle SIGTERM as Ctrl-C inside the block, so that it cleans up.

    An event loop that handles SIGTERM itself takes precedence.
    """
    flag, mine = SigtermFlag(), os.getpid()

    def end(_number: int, _frame: object) -> None:
        flag.received = True
        if os.getpid() != mine or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            _end(TERMINATED)  # shells ignore SIGINT in background jobs
        signal.raise_signal(signal.SIGINT)

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield flag
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(code: int) -> None:
    os.write(2, _LINE)
    os._exit(code)
