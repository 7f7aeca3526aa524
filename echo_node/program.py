"""How a program of ours ends: with one clear line and an exit code that means something.

0 done, 1 something failed, 2 what the person wrote cannot be used, 130 stopped by Ctrl-C, 143 by SIGTERM. What nobody has foreseen is a bug of
ours, and its traceback goes into a file that can be sent to us.
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

from echo_node import log
from echo_node.ctrl_c import INTERRUPTED, TERMINATED, sigterm_as_ctrl_c
from echo_node.errors import ConfigError, DefectError, EchoError, StoreError, boundary
from echo_node.saying import say

_NAME: Final = "echo-node"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def main(app: Callable[[], object], name: str) -> NoReturn:
    """Run a command line in a process that is there for nothing else, which ends as said above, as soon as all is done.

    The interpreter is not taken down: with torch in it that takes a core 1.5 seconds, so that a machine which is busy has a node
    linger long after it has said its last word; and it breaks into threads that still compute, or waits for them.
    """
    code: object = 0
    _open_what_is_closed()
    with sigterm_as_ctrl_c() as told:
        try:
            run(app, name)
        except SystemExit as end:
            code = TERMINATED if told.to_end and end.code == INTERRUPTED else end.code
    atexit._run_exitfuncs()  # noqa: SLF001 - folders and engines that nobody has closed
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def run(app: Callable[[], object], name: str) -> None:
    """Run a command line and end as said above, by `SystemExit`."""
    log.set_up()
    _speak_whatever_alphabet()
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
            _stopped(name)  # typer has turned it into an exit code, without a word
        raise


@asynccontextmanager
async def until_told_to_stop(first: Callable[[], object] | None = None) -> AsyncGenerator[None]:
    """The block is cancelled at the first SIGINT or SIGTERM, or `first` is called, which sees to its end in good order; at
    the second one the process ends at once.
    """

    async def listen() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            told = 0
            async for _ in signals:
                told += 1
                if told > 1:
                    os._exit(INTERRUPTED)
                (first or block.cancel)()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        with trio.CancelScope() as block:
            yield
        nursery.cancel_scope.cancel()


def name_as_called() -> str:
    """What a person types to have this program again: its name if the shell finds it, else the way that led to it."""
    if shutil.which(_NAME) is not None or Path(sys.argv[0]).name != _NAME:
        return _NAME
    way = Path(sys.argv[0])
    return str(way.relative_to(Path.cwd()) if way.is_relative_to(Path.cwd()) else way)


def _open_what_is_closed() -> None:
    """Where a shell, or a service, has closed a stream there is none; and the next file, perhaps a database, would get its
    number, to which libraries write.
    """
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # in their order: each gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _speak_whatever_alphabet() -> None:
    """Not every terminal knows every character: a question mark in a line is better than no line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether an exit was made of a Ctrl-C, and of nothing that was said already."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _stopped(name: str) -> NoReturn:
    say(f"{name}: stopped", err=True)
    sys.exit(INTERRUPTED)


def _first(group: BaseExceptionGroup[EchoError]) -> EchoError:
    """Tasks that fail together mostly fail for one reason: the first one."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _full_disk(error: EchoError) -> StoreError | None:
    """A disk without room is no bug of ours, wherever it shows: often it is the one that the output goes to."""
    cause = error.__cause__
    if not (isinstance(error, DefectError) and isinstance(cause, OSError) and cause.errno in _FULL):
        return None
    where = f" to {cause.filename}" if cause.filename else ""
    return StoreError(
        f"writing{where}: {cause.strerror}", advice="make room on that disk, or let the output go elsewhere"
    )


def _stop_with(name: str, error: EchoError) -> NoReturn:
    if isinstance(error, DefectError):
        error = DefectError(
            error.what, advice=error.advice or f"a bug: please report it{_written_down(error)}"
        )
    say(f"{name}: {error}", err=True)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def _written_down(error: BaseException) -> str:
    """Where it happened, in a file: it may not happen a second time."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix="echo-node-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return ""
    return f" with {file.name}, which says where it happened"
