"""Parent's handle of an engine process: start, log, end, and why it ended.

One thread per process starts it, keeps the last lines of its output, and waits for its end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from queue import SimpleQueue
from typing import Final

from echo_node.engine.worker.tempdir import WorkerTempDir
from echo_node.engine.worker.watchdog import OUT_OF_MEMORY
from echo_node.errors import EngineError, one_line
from echo_node.runtime.ipc import Pipe, pair

_log = logging.getLogger(__name__)

_PROGRAM: Final = "echo_node.engine.worker.main"
_LINES: Final = 80
_LINE_BYTES: Final = 400
_QUOTED: Final = 260  # characters of the log in an error
_REAP_SECONDS: Final = 10.0
_FATAL: Final = "Fatal Python error"
_MODULES: Final = "Extension modules:"  # a line of faulthandler's, long and of no use


class EngineProcess:
    """One process, from its start to its end."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._scratch = WorkerTempDir()
        ours, theirs = pair()
        self.pipe = Pipe(ours, drains=True)
        self.memory_seen: int | None = None
        """Resident bytes in its last heartbeat."""
        self._lines: deque[str] = deque(maxlen=_LINES)
        started: SimpleQueue[subprocess.Popen[bytes] | OSError] = SimpleQueue()
        # The kernel kills the process with the thread that started it, so that thread must outlive
        # all callers.
        environment = {**environment, "TMPDIR": str(self._scratch.path)}
        self._keeper = threading.Thread(
            target=self._keep, args=(theirs.fileno(), environment, started), name="engine log", daemon=True
        )
        self._keeper.start()
        child = started.get()
        theirs.close()
        if isinstance(child, OSError):
            ours.close()
            self._scratch.remove()
            raise EngineError(f"a process for the engine could not be started: {child}") from child
        self._child = child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def wait(self, seconds: float) -> bool:
        """Return whether the process ends within so many seconds.

        It is reaped then, and its log is complete.
        """
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._keeper.join(seconds)
        return True

    def end(self, grace_seconds: float = 0.0) -> None:
        """Wait `grace_seconds` for the process, then kill it; reap and clean up."""
        if not self.wait(grace_seconds):
            self._child.kill()
            self.wait(_REAP_SECONDS)
        self.pipe.close()
        self._scratch.remove()

    def kill(self) -> None:
        """End it at once, without waiting."""
        self._child.kill()

    def cause(self) -> str:
        """Return why it ended, as text."""
        code = self._child.returncode
        if code is None:
            return "it does not end"
        reason = next((line for line in reversed(self._lines) if "out of memory" in line), None)
        if code == OUT_OF_MEMORY:
            return reason or "out of memory"
        if code < 0:
            name = _signal_name(-code)
            if -code == signal.SIGABRT and any("bad_alloc" in line for line in self._lines):
                return f"out of memory: killed by {name}"
            return f"killed by {name}"
        return f"it ended with exit code {code}"

    def last_lines(self) -> str:
        """Return the end of the process's log, short enough for an error."""
        lines = [line for line in self._lines if line.strip() and not line.startswith(_MODULES)]
        fatal = next((at for at in reversed(range(len(lines))) if lines[at].startswith(_FATAL)), None)
        if fatal is not None:
            return " | ".join(lines[fatal:])[:_QUOTED]
        return " | ".join(lines)[-_QUOTED:]

    def _keep(
        self, end: int, environment: dict[str, str], started: SimpleQueue[subprocess.Popen[bytes] | OSError]
    ) -> None:
        # Not from the current folder (-P): a file there may have the name of a library.
        command = [sys.executable, "-P", "-u", "-m", _PROGRAM, str(end), str(os.getpid())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(end,),
                env=environment,
                bufsize=0,
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        with process:
            if process.stdout is not None:
                self._read(process.stdout.fileno())

    def _read(self, log: int) -> None:
        rest = b""
        while chunk := os.read(log, 2**16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._note(line)
            rest = rest[-_LINE_BYTES:]
        if rest:
            self._note(rest)

    def _note(self, line: bytes) -> None:
        text = one_line(line[:_LINE_BYTES].decode("utf-8", "replace").rstrip())
        self._lines.append(text)
        _log.debug("engine process: %s", text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
