"""Reader-writer lock for threads, with deadlines.

A waiting writer goes before readers that come later, so that readers cannot starve it. Do not take
a second read lock within one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from echo_node.errors import StoreError


class RwLock:
    """Lock of one thing that is read and written."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._readers = 0
        self._writing = False
        self._waiting = 0

    @contextmanager
    def reading(self, deadline: float) -> Generator[None]:
        with self._change:
            self._wait(lambda: not self._writing and not self._waiting, deadline, "being written")
            self._readers += 1
        try:
            yield
        finally:
            with self._change:
                self._readers -= 1
                self._change.notify_all()

    @contextmanager
    def writing(self, deadline: float) -> Generator[None]:
        with self._change:
            self._waiting += 1
            try:
                self._wait(lambda: not self._writing and not self._readers, deadline, "being read")
                self._writing = True
            finally:
                self._waiting -= 1
                self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._writing = False
                self._change.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline: float, why: str) -> None:
        end = time.monotonic() + deadline
        while not ready():
            left = end - time.monotonic()
            if left <= 0 or not self._change.wait(left):
                if ready():
                    return
                raise StoreError(
                    f"the weights are still {why} after {deadline:g} s",
                    advice="is an engine stuck under a lease?",
                )
