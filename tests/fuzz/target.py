"""A target: the real code that takes bytes from outside, and what may come out of it.

Whatever comes in, only errors of ours come out (those name who failed), no bug is merely contained
and logged, nothing waits for ever, and what is said about it stays short. It knows no fuzzer:
targets run alone, in the suite and under atheris.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from echo_node.errors import EchoError
from protocol import ProtocolError

Feed: TypeAlias = Callable[[bytes], object]
"""It raises an error of ours, or returns False, for what it refuses."""
Opener: TypeAlias = Callable[[], AbstractContextManager[Feed]]

OURS: Final = (EchoError, ProtocolError)
LONGEST_WORDS: Final = 2_000
"""Characters of an error: a peer may have chosen them."""


class BugError(AssertionError):
    """Something came out that must not."""


@dataclass(frozen=True, slots=True)
class Target:
    """One entry point.

    `entry` is the code that takes the bytes; `also` are errors that its caller expects besides
    ours.
    """

    name: str
    entry: str
    opener: Opener
    seeds: Callable[[], list[bytes]]
    also: tuple[type[BaseException], ...] = ()
    most: int = 4_096
    """Bytes of an input that a fuzzer makes."""
    prefix: int = 0
    """Bytes at the start that choose what is done with the rest."""
    takes: bool = True
    """Whether some of its seeds are accepted.

    If none is, its surroundings are missing, and every input is refused.
    """
    memory: int = 8 * 2**20
    """Bytes that one input may take for a moment, besides seventy times its own size."""

    @contextmanager
    def open(self) -> Generator[Feed]:
        """Return a function that takes inputs.

        It returns whether the input was accepted, and raises for a bug alone.
        """
        contained = _Contained()
        log = logging.getLogger("echo_node")
        was = log.level, log.propagate
        log.addHandler(contained)
        log.setLevel(logging.ERROR)  # what is said below that costs time, and is said to nobody
        log.propagate = False
        try:
            with self.opener() as feed:
                yield lambda data: self._judged(feed, contained, data)
        finally:
            log.removeHandler(contained)
            log.setLevel(was[0])
            log.propagate = was[1]

    def _judged(self, feed: Feed, contained: _Contained, data: bytes) -> bool:
        contained.records.clear()
        taken = False
        try:
            taken = feed(data) is not False
        except BugError:
            raise
        except OURS as error:
            if len(str(error)) > LONGEST_WORDS:
                raise BugError(f"an error of {len(str(error))} characters") from error
        except self.also:
            pass
        for record in contained.records:
            cause = record.exc_info[1] if record.exc_info else None
            raise BugError(f"a bug was contained: {record.getMessage()[:400]}") from cause
        return taken


class _Contained(logging.Handler):
    """Errors that were logged.

    A node logs nothing at this level about a peer, only about itself.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def plain(feed: Feed) -> Opener:
    """An opener of what needs nothing around it."""

    @contextmanager
    def opened() -> Generator[Feed]:
        yield feed

    return opened
