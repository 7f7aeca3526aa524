"""Error types, named after who failed.

    EchoError           something failed, and the leaf says who
    ├── PeerError       another node lied, broke the protocol or went away
    ├── EngineError     the process that generates and scores
    ├── ContractError   the plug-in that makes prompts and rewards
    ├── ConfigError     the user's input: a flag, a file, a link
    ├── StoreError      this machine's disk, or the data on it
    └── DefectError     a bug in echo-node, worth a report

The text says what was being done and what went wrong; `advice` says what to do next. Errors of
other libraries become one of these in `boundary`, the only place that catches `Exception`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONGEST = 600
"""Most characters of one error; peers may choose its text."""
_PANIC = "PanicException"
"""Raised by Rust libraries on unexpected input. It is no `Exception`, and would end the program."""
_SPEAKS_IN_SENTENCES = frozenset({"protocol", "tomllib", "multiaddr"})
"""Packages whose errors are complete sentences, without the name of the exception's class."""


class EchoError(Exception):
    """Base of every error that this program can explain."""

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
    """The plug-in that makes prompts and rewards failed."""


class ConfigError(EchoError):
    """The user's input cannot be used as it is."""


class StoreError(EchoError):
    """Local disk or the data on it cannot be used."""


class DefectError(EchoError):
    """A bug in echo-node."""


@contextmanager
def boundary(failed: type[EchoError], doing: str, *, advice: str = "") -> Iterator[None]:
    """Turn every exception of the block into `failed`, with `doing` as its context.

    An `EchoError` passes through unchanged, and so do trio's `Cancelled`, `KeyboardInterrupt` and
    `SystemExit`, which are no failures.
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
    named: Path | str, *, advice: str = "check its name and its permissions"
) -> AbstractContextManager[None]:
    """Guard access to a path that the user gave: it may be too long, or not readable."""
    return boundary(ConfigError, f"looking at {named}", advice=advice)


def one_line(text: str) -> str:
    """Return the text as one printable line of at most `LONGEST` characters."""
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
        return "it is not UTF-8 text"
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    if text and type(cause).__module__.partition(".")[0] in _SPEAKS_IN_SENTENCES:
        return text
    return f"{name}: {text}" if text else name
