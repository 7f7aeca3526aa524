"""Parent's handle of a jailed process: start, stop, and why it ended.

The process gets an almost empty environment and one inherited socket.
"""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from echo_node.errors import ContractError
from echo_node.runtime.ipc import Pipe, pair

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

    def __init__(self, folders: Sequence[Path]) -> None:
        ours, theirs = pair()
        self.pipe = Pipe(ours, max_bytes=MAX_MESSAGE_BYTES)
        self.served = 0
        """Answers received so far."""
        try:
            self._child = _start(theirs, environment_for(folders))
        except OSError as error:
            ours.close()
            raise ContractError(f"a process for a contract could not be started: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def kill(self) -> None:
        """Kill the process without waiting for it."""
        self._child.kill()

    def suspend(self) -> None:
        """Stop the process until `resume`, so that threads left by a text do nothing meanwhile."""
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the suspended process."""
        self._child.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self._child.kill()
        self._wait(_REAP_SECONDS)
        self.pipe.close()

    def cause(self) -> str:
        """Return in words why the process ended, once its pipe has ended; reap it."""
        ended_itself = self._wait(_LINGER_SECONDS)
        self.end()
        return _cause(self._child.returncode) if ended_itself else "it closed its pipe to the node"

    def _wait(self, seconds: float) -> bool:
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _start(theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # -P: a file in the current folder must not shadow a library.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=environment,
        cwd="/",
        start_new_session=True,  # Ctrl-C in a terminal reaches the node alone
    )


def environment_for(folders: Sequence[Path]) -> dict[str, str]:
    """Return the child's environment: little of ours, since ours may hold tokens."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = os.pathsep.join(str(folder.resolve()) for folder in folders)
    own_packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {**inherited, **own_packages, **_SET, **({"PYTHONPATH": paths} if paths else {})}


def _cause(code: int) -> str:
    if code == OUT_OF_MEMORY:
        return "it took more memory than it is allowed"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return _SIGNAL_TEXTS.get(name, f"its process was killed by {name}")
