"""Parent's handle of a jailed process: start, stop, messages, and why it ended.

The process gets an almost empty environment and two inherited sockets: the pipe, and one over which
it hands over the descriptor at which the node answers its forks (`fork_permit`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from echo_node.contract.builtin import problems
from echo_node.contract.jail.fork_permit import ForkPermits
from echo_node.errors import ContractError
from echo_node.runtime.ipc import Message, Pipe, PipeSilentError, pair

OUT_OF_MEMORY: Final = 112
"""Exit code of a process that ran out of memory."""
MAX_MESSAGE_BYTES: Final = 8 * 2**20
"""Most bytes of one message, in either direction."""
_PROGRAM: Final = "echo_node.contract.jail.main"
_REAP_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 0.5  # between the end of the pipe and the exit of its process
_INHERITED: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
_SET: Final = {
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "MKL_NUM_THREADS": "1",  # Landlock and namespaces need a single thread
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # a score is the same in every process
    "PYTHONUTF8": "1",
    "TZ": "UTC",
}
_SIGNAL_TEXTS: Final = {
    "SIGSEGV": "it crashed (SIGSEGV)",
    "SIGBUS": "it crashed (SIGBUS)",
    "SIGABRT": "it crashed (SIGABRT)",
    "SIGSYS": "it made a system call of another architecture (SIGSYS)",
    "SIGXCPU": "its process has used up its processor time (SIGXCPU)",
    "SIGXFSZ": "it wrote to a file (SIGXFSZ)",
}


class JailedProcess:
    """One jailed process, from its start to its end.

    The kernel kills it with the thread that started it, so that thread must outlive all callers.
    """

    def __init__(self) -> None:
        ours, theirs = pair()
        self._control, their_control = pair()
        self.pipe = Pipe(ours, max_bytes=MAX_MESSAGE_BYTES)
        self.served = 0
        """Answers received so far."""
        self._permits: ForkPermits | None = None
        try:
            self._child = _start((theirs, their_control), environment_for())
        except OSError as error:
            ours.close()
            self._control.close()
            raise ContractError(f"a process for a contract could not be started: {error}") from error
        finally:
            theirs.close()
            their_control.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def receive(self, seconds: float, *, forks: int = 0) -> Message:
        """Return the next message; allow exactly `forks` forks meanwhile."""
        until = time.monotonic() + seconds
        if self._permits is not None:
            self._permits.left = forks
        while (message := self.pipe.receive(0)) is None:
            left = until - time.monotonic()
            if left <= 0:
                raise PipeSilentError(f"no complete message came within {seconds:g} seconds")
            self._wait_for_something(left, forks)
        return message

    def _wait_for_something(self, seconds: float, forks: int) -> None:
        """Wait for bytes of the pipe; answer forks, and take the descriptor for that."""
        poll = select.poll()
        poll.register(self.pipe.fileno(), select.POLLIN)
        other = self._control if self._permits is None else self._permits
        if other.fileno() >= 0:
            poll.register(other.fileno(), select.POLLIN)
        found = dict(poll.poll(seconds * 1000))
        if self.pipe.fileno() in found:
            return  # an answer is read before the fork for the next item counts against it
        events = found.get(other.fileno(), 0)
        if isinstance(other, ForkPermits):
            if events & select.POLLIN:
                other.answer()
            elif events:  # nobody is left to ask
                time.sleep(min(seconds, 0.001))
        elif events:
            with contextlib.suppress(OSError):
                _, passed, _, _ = socket.recv_fds(other, 1, 1)
                self._permits = ForkPermits(passed[0], self.pid) if passed else None
                if self._permits is not None:  # it may come with the first request already under way
                    self._permits.left = forks
            other.close()

    def kill(self) -> None:
        """Kill the process and those that it forked, without waiting for them."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()

    def suspend(self) -> None:
        """Stop the process until `resume`: threads left by a text do nothing meanwhile."""
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the suspended process."""
        self._child.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self.kill()
        self._wait(_REAP_SECONDS)
        self.pipe.close()
        self._control.close()
        if self._permits is not None:
            self._permits.close()
            self._permits = None

    def cause(self) -> str:
        """Return in words why the process ended, once its pipe has ended; reap it."""
        ended_itself = self._wait(_LINGER_SECONDS)
        self.end()
        return cause_of(self._child.returncode) if ended_itself else "it closed its pipe to the node"

    def _wait(self, seconds: float) -> bool:
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _start(ends: tuple[socket.socket, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # -P: a file in the current folder must not shadow a library.
    numbers = tuple(end.fileno() for end in ends)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, *map(str, numbers), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=numbers,
        env=environment,
        cwd="/",
        start_new_session=True,  # Ctrl-C in a terminal reaches the node alone
    )


def environment_for(folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return the child's environment: little of ours, since ours may hold tokens."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = os.pathsep.join(str(folder.resolve()) for folder in folders)
    own_packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    data = {problems.VARIABLE: str(problems.folder())}
    return {**inherited, **own_packages, **data, **_SET, **({"PYTHONPATH": paths} if paths else {})}


def cause_of(code: int) -> str:
    """Return in words why a process ended with this code; negative ones are signals."""
    if code == OUT_OF_MEMORY:
        return "it took more memory than it is allowed"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return _SIGNAL_TEXTS.get(name, f"its process was killed by {name}")
