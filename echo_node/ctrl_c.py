"""Ctrl-C while nothing runs yet: one line, and the exit code that shells expect."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130
"""What shells expect of a program that Ctrl-C has ended."""


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """While libraries are loaded: an exception in the middle of that can abort the process, and nothing is lost yet."""

    def stop(_signal: int, _frame: object) -> None:
        os.write(2, b"echo-node: stopped\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
