"""Who failed. Every error that leaves a room is one of these:

    EchoError           something failed, and the leaf says who
    ├── PeerError       another node lied, broke the protocol or went away
    ├── EngineError     the process that generates and scores
    ├── ContractError   the plug-in that sets prompts and rewards
    ├── ConfigError     what the person wrote: a flag, a file, a link
    ├── StoreError      this machine's disk, or what is on it
    └── DefectError     ourselves: a bug, worth a report

The text says what was being done and what went wrong; `advice` says what to do next. Errors of
other libraries become one of these in `boundary`, the only place that catches `Exception`.
This module knows nothing of who raises and who shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONGEST = 600  # characters of one error: a peer may choose the text that ends up in it
_PANIC = "PanicException"
"""What libraries in Rust raise where they did not expect their input. It is no `Exception`, and would end the program."""
_SPEAKS_IN_SENTENCES = frozenset({"protocol", "tomllib", "multiaddr"})
"""Packages whose errors say all in their text, so that the name of a class adds nothing for a person."""


class EchoError(Exception):
    """The root: catch it to catch whatever this program can explain."""

    def __init__(self, what: str, *, advice: str = "") -> None:
        super().__init__(what)
        self.what = one_line(what)
        self.advice = one_line(advice)

    def __str__(self) -> str:
        return f"{self.what} ({self.advice})" if self.advice else self.what


class PeerError(EchoError):
    """Another node lied, broke the protocol or went away."""


class EngineError(EchoError):
    """The process that generates and scores failed."""


class ContractError(EchoError):
    """The plug-in that sets prompts and rewards failed."""


class ConfigError(EchoError):
    """What the person wrote cannot be used as it stands."""


class StoreError(EchoError):
    """This machine's disk, or what is on it, cannot be used."""


class DefectError(EchoError):
    """A bug of ours."""


@contextmanager
def boundary(failed: type[EchoError], doing: str, *, advice: str = "") -> Iterator[None]:
    """Whatever escapes from the block is `failed`'s fault, and happened while `doing`.

    What already names its culprit passes through unchanged, and so do trio's `Cancelled`,
    `KeyboardInterrupt` and `SystemExit`, which are no failures.
    """
    try:
        yield
    except EchoError:
        raise
    except Exception as cause:
        if isinstance(cause, ExceptionGroup) and cause.split(EchoError)[1] is None:
            raise  # a nursery whose every failure names its culprit
        raise failed(f"{doing}: {_reason(cause, doing, failed)}", advice=advice) from cause
    except BaseException as cause:
        if type(cause).__name__ != _PANIC:
            raise
        raise failed(f"{doing}: a library gave up: {cause}", advice=advice) from None


def looking_at(
    named: Path | str, *, advice: str = "is its name right, and may you read it?"
) -> AbstractContextManager[None]:
    """A look at a path that a person wrote: it may be too long for a name, or not theirs to see."""
    return boundary(ConfigError, f"looking at {named}", advice=advice)


def one_line(text: str) -> str:
    """The text as one printable line of bounded length, whoever chose its characters."""
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: LONGEST + 1])
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 1] + "…"


def _reason(cause: Exception, doing: str, failed: type[EchoError]) -> str:
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    name, text = type(cause).__name__, str(cause)
    if not issubclass(
        failed, ConfigError | StoreError
    ):  # for whoever reads a log: the kind of failure is news there
        return f"{name}: {text}" if text else name
    if isinstance(cause, OSError) and cause.strerror:
        file = "" if cause.filename is None else str(cause.filename)
        return cause.strerror if not file or file in doing else f"{cause.strerror}: {file}"
    if isinstance(cause, UnicodeDecodeError):
        return "it is no text in UTF-8"
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    if text and type(cause).__module__.partition(".")[0] in _SPEAKS_IN_SENTENCES:
        return text
    return f"{name}: {text}" if text else name
