"""Ctrl-C, and SIGTERM, while nothing runs yet or nobody else listens: one line, and the exit code that shells expect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130
"""What shells expect of a program that Ctrl-C has ended."""
TERMINATED: Final = 143
"""The same of SIGTERM, where it is not the way to end a node in order."""
_LINE: Final = b"echo-node: stopped\n"


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """While libraries are loaded: an exception in the middle of that can abort the process, and nothing is lost yet."""

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
    """While something short is done to its end, as removing what would else be left behind: signals are heard after it."""
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


class Told:
    """Whether SIGTERM has come."""

    to_end = False


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[Told]:
    """SIGTERM ends what the block does as Ctrl-C would, so that it tidies up. Who listens for the signal itself hears it instead."""
    told, mine = Told(), os.getpid()

    def end(_number: int, _frame: object) -> None:
        told.to_end = True
        if os.getpid() != mine or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            _end(TERMINATED)  # a shell has its jobs in the background hear no Ctrl-C
        signal.raise_signal(signal.SIGINT)

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield told
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(code: int) -> None:
    os.write(2, _LINE)
    os._exit(code)
