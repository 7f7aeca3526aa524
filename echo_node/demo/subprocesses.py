"""Child processes of the demo: nodes that print their events as JSON lines.

No child outlives the demo: `cli.demo_process` ends it when the demo itself is killed.
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
from echo_node.runtime.threads import run_abandonable

LINE_BYTES: Final = 1 << 20
"""Bytes of one event; a longer line is not a node's."""
LAST_LINES: Final = 6
"""Log lines that a failure shows."""
_LOG_BYTES: Final = 16_384
"""Bytes at the end of a log that these are taken from."""
_FRAME: Final = " |+-^~"
"""Characters that frame a traceback."""

OnEvent = Callable[[Mapping[str, Any]], None]


def node_command(words: Sequence[str]) -> list[str]:
    """Return the command of a node that ends with this process.

    With -P, since a file in the current folder may have the name of a library.
    """
    return [sys.executable, "-P", "-m", "echo_node.cli.demo_process", str(os.getpid()), *words]


class Child:
    """One child process.

    `on_event` is called with each of its events, which are kept in a file beside `log`; `log` gets
    its standard error.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, on_event: OnEvent) -> None:
        self.name = name
        self._log = log
        self._on_event = on_event
        self.silent = trio.Event()
        """Set when its output has ended: the process has ended, or is about to."""
        # In a process group of its own: Ctrl-C on a terminal is for the demo alone. And from the
        # thread that lives as long as the demo does, since the kernel ends a child with the thread
        # that started it.
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
        """Exit code; None while it runs."""
        return self._process.poll()

    async def listen(self) -> None:
        """Read the events of the process until its output ends."""
        output = self._process.stdout
        if output is None:
            return
        try:
            with self._log.with_suffix(".jsonl").open("ab", buffering=0) as kept:
                async with trio.lowlevel.FdStream(os.dup(output.fileno())) as stream:
                    rest = b""
                    async for chunk in stream:
                        kept.write(chunk)
                        *lines, rest = (rest + chunk).split(b"\n")
                        rest = rest[-LINE_BYTES:]
                        for line in lines:
                            self._parse(line)
        finally:
            self.silent.set()

    def _parse(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # not an event: a library prints
        if isinstance(event, dict) and "event" in event:
            self._on_event(event)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.code is None:
            self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the exit of the process; the caller sets the deadline."""
        return await run_abandonable(self._process.wait)

    def close(self) -> None:
        """Close the pipe of an ended process."""
        if self._process.stdout is not None:
            self._process.stdout.close()

    def last_words(self) -> list[str]:
        """Return the last lines of its log."""
        with boundary(EngineError, f"reading {self._log}"):
            written = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        lines = [line for line in written.splitlines() if line.strip(_FRAME)]
        return [_plain(line.strip(_FRAME)) for line in lines[-LAST_LINES:]]

    def how_it_ended(self) -> str:
        """Return how the process ended, as part of a sentence."""
        code = self.code
        if code is None:
            return "its output has ended"
        return f"it was ended by {_signal_name(-code)}" if code < 0 else f"it ended with exit code {code}"


async def end_all(children: Sequence[Child], seconds: float) -> None:
    """Terminate all children, and kill those that still run after this many seconds."""
    with trio.CancelScope(shield=True):
        for child in children:
            child.terminate()
        with trio.move_on_after(seconds):
            for child in children:
                await child.ended()
        for child in children:
            child.kill()
        for child in children:
            await child.ended()  # nothing refuses SIGKILL
            child.close()


def _plain(line: str) -> str:
    """Return a log line as text."""
    try:
        entry = json.loads(line)
    except ValueError:
        return one_line(line)
    return one_line(f"{entry.get('level')}: {entry.get('what')}" if isinstance(entry, dict) else line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
