"""Run a command line; end with one line and an exit code.

0 done, 1 failed, 2 unusable input, 130 stopped by Ctrl-C, 143 by SIGTERM. An unforeseen error is
a bug: its traceback goes into a file for the report.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import trio

from echo_node.errors import ConfigError, DefectError, EchoError, StoreError, boundary
from echo_node.runtime import logging_setup
from echo_node.runtime.console import say
from echo_node.runtime.signals import INTERRUPTED, TERMINATED, sigterm_as_ctrl_c

_NAME: Final = "echo-node"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def main(app: Callable[[], object], name: str) -> NoReturn:
    """Run a command line as this process's only work, and end the process.

    The interpreter is not shut down: with torch loaded that takes 1.5 seconds of CPU, and it
    interrupts threads that still compute, or waits for them.
    """
    code: object = 0
    _open_closed_streams()
    with sigterm_as_ctrl_c() as sigterm:
        try:
            run(app, name)
        except SystemExit as end:
            code = TERMINATED if sigterm.received and end.code == INTERRUPTED else end.code
    atexit._run_exitfuncs()  # noqa: SLF001 - folders and engines that nobody has closed
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def run(app: Callable[[], object], name: str) -> None:
    """Run a command line and raise `SystemExit` with its exit code."""
    logging_setup.set_up()
    _replace_unprintable()
    try:
        with boundary(DefectError, "running this command"):
            app()
    except EchoError as error:
        _stop_with(name, _full_disk(error) or error)
    except BaseExceptionGroup as group:
        explained, unexplained = group.split(EchoError)
        if explained is None or unexplained is not None:
            raise
        _stop_with(name, _first(explained))
    except KeyboardInterrupt:
        _stopped(name)
    except SystemExit as end:
        if _by_ctrl_c(end.__context__):
            _stopped(name)  # typer has turned it into an exit code and printed nothing
        raise


@asynccontextmanager
async def until_stop_signal(first: Callable[[], object] | None = None) -> AsyncGenerator[None]:
    """Cancel the block, or call `first`, at the first SIGINT or SIGTERM.

    The process ends at once at the second one.
    """

    async def listen() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            received = 0
            async for _ in signals:
                received += 1
                if received > 1:
                    os._exit(INTERRUPTED)
                (first or block.cancel)()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        with trio.CancelScope() as block:
            yield
        nursery.cancel_scope.cancel()


def command_name() -> str:
    """Return the command of this program: its name if on the path, else its path."""
    if shutil.which(_NAME) is not None or Path(sys.argv[0]).name != _NAME:
        return _NAME
    way = Path(sys.argv[0])
    return str(way.relative_to(Path.cwd()) if way.is_relative_to(Path.cwd()) else way)


def _open_closed_streams() -> None:
    """Open /dev/null for every standard stream that is closed.

    Else the next file, perhaps a database, would get its number, to which libraries write.
    """
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # in their order: each gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _replace_unprintable() -> None:
    """Replace characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Return whether an exit was caused by Ctrl-C alone."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _stopped(name: str) -> NoReturn:
    say(f"{name}: stopped", err=True)
    sys.exit(INTERRUPTED)


def _first(group: BaseExceptionGroup[EchoError]) -> EchoError:
    """Return the first error of a group; joint failures mostly share one cause."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _full_disk(error: EchoError) -> StoreError | None:
    """Return a `StoreError` for a full disk, which is no bug.

    Often the output goes to that disk.
    """
    cause = error.__cause__
    if not (isinstance(error, DefectError) and isinstance(cause, OSError) and cause.errno in _FULL):
        return None
    where = f" to {cause.filename}" if cause.filename else ""
    return StoreError(
        f"writing{where}: {cause.strerror}", advice="make room on that disk, or redirect the output"
    )


def _stop_with(name: str, error: EchoError) -> NoReturn:
    if isinstance(error, DefectError):
        error = DefectError(
            error.what, advice=error.advice or f"a bug: please report it{_save_traceback(error)}"
        )
    say(f"{name}: {error}", err=True)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def _save_traceback(error: BaseException) -> str:
    """Write the traceback into a file and return a phrase that names it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix="echo-node-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return ""
    return f" with {file.name}, which holds the traceback"
