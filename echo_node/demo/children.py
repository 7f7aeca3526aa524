"""The processes of the demo: started, listened to, ended. Each is a node that says what happens as lines of JSON.

No process outlives the demo: `member` sees to that where the demo itself is killed. It knows nothing of what nodes say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.config import one_thread_environment
from echo_node.errors import EngineError, boundary, one_line
from echo_node.threads import run_abandonable

LINE_BYTES: Final = 1 << 20
"""Of one event; a longer line is none of a node's."""
LAST_LINES: Final = 6
_LOG_BYTES: Final = 16_384
_FRAME: Final = " |+-^~"
"""What is drawn around a traceback."""

Heard = Callable[[Mapping[str, Any]], None]


def node(words: Sequence[str]) -> list[str]:
    """The command of a node that ends with this process. Not from the current folder (-P): a file there may have the name of
    a library.
    """
    return [sys.executable, "-P", "-m", "echo_node.demo.member", str(os.getpid()), *words]


class Child:
    """One process. `heard` is called with each event that it tells; events are kept beside `log`, the file with all that it
    writes else.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, heard: Heard) -> None:
        self.name = name
        self._log = log
        self._heard = heard
        self.silent = trio.Event()
        """It tells nothing more: it has ended, or is about to."""
        # In a process group of its own: Ctrl-C on a terminal is the demo's to hear. And from the thread that lives as long as
        # the demo does, since the kernel ends a child with the thread that started it.
        with boundary(EngineError, f"starting the {name}"), log.open("ab") as written:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=written,
                env=one_thread_environment(),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What it ended with; None while it runs."""
        return self._process.poll()

    async def listen(self) -> None:
        """Hear the process until it has no more to tell."""
        told = self._process.stdout
        if told is None:
            return
        try:
            with self._log.with_suffix(".jsonl").open("ab", buffering=0) as kept:
                async with trio.lowlevel.FdStream(os.dup(told.fileno())) as stream:
                    rest = b""
                    async for chunk in stream:
                        kept.write(chunk)
                        *lines, rest = (rest + chunk).split(b"\n")
                        rest = rest[-LINE_BYTES:]
                        for line in lines:
                            self._hear(line)
        finally:
            self.silent.set()

    def _hear(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # not an event: some library prints
        if isinstance(event, dict) and "event" in event:
            self._heard(event)

    def tell_to_stop(self) -> None:
        """Ask it to end in order."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.code is None:
            self._process.send_signal(number)

    async def ended(self) -> int:
        """Until the process is gone. The caller sets the deadline."""
        return await run_abandonable(self._process.wait)

    def close(self) -> None:
        """The process is gone; so is its pipe."""
        if self._process.stdout is not None:
            self._process.stdout.close()

    def last_words(self) -> list[str]:
        """The end of its log, for a person."""
        with boundary(EngineError, f"reading {self._log}"):
            written = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        lines = [line for line in written.splitlines() if line.strip(_FRAME)]
        return [_plain(line.strip(_FRAME)) for line in lines[-LAST_LINES:]]

    def how_it_ended(self) -> str:
        code = self.code
        if code is None:
            return "it tells nothing more"
        return f"it was ended by {_signal_name(-code)}" if code < 0 else f"it ended with exit code {code}"


async def end_all(children: Sequence[Child], seconds: float) -> None:
    """Have all of them end in order, within so long, and those that do not, at once. None is left, come what may."""
    with trio.CancelScope(shield=True):
        for child in children:
            child.tell_to_stop()
        with trio.move_on_after(seconds):
            for child in children:
                await child.ended()
        for child in children:
            child.kill()
        for child in children:
            await child.ended()  # nothing refuses SIGKILL
            child.close()


def _plain(line: str) -> str:
    """A line of a log, as words."""
    try:
        told = json.loads(line)
    except ValueError:
        return one_line(line)
    return one_line(f"{told.get('level')}: {told.get('what')}" if isinstance(told, dict) else line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
