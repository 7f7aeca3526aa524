"""A jailed process as the node sees it: started with an empty environment and one pipe, ended, and by what it ended.

What is said through the pipe is none of this room's business.
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

from echo_node.contract.jail.pipe import Pipe
from echo_node.errors import ContractError

OUT_OF_MEMORY: Final = 112
_PROGRAM: Final = "echo_node.contract.jail.serving"
_REAP_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 0.5  # between the end of a pipe and that of its process
_HANDED_ON: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
_SET: Final = {
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "MKL_NUM_THREADS": "1",  # a jail is closed around one thread
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # a score is the same in every process
    "PYTHONUTF8": "1",
    "TZ": "UTC",
}
_WORDS: Final = {
    "SIGSEGV": "it crashed (SIGSEGV)",
    "SIGBUS": "it crashed (SIGBUS)",
    "SIGABRT": "it crashed (SIGABRT)",
    "SIGSYS": "it made a system call of another kind of machine (SIGSYS)",
    "SIGXCPU": "its process has used up its processor time (SIGXCPU)",
    "SIGXFSZ": "it wrote to a file (SIGXFSZ)",
}


class JailedProcess:
    """One process, from its start to its end.

    The kernel ends it with the thread that has started it, so that has to be one that lives on.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        ours, theirs = socket.socketpair()
        self.pipe = Pipe(ours)
        self.served = 0
        """How many answers it has given."""
        try:
            self._child = _start(theirs, environment_for(folders))
        except OSError as error:
            ours.close()
            raise ContractError(f"a process for a contract could not be started: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._child.pid

    def kill(self) -> None:
        """End it at once, without waiting."""
        self._child.kill()

    def rest(self) -> None:
        """Stop it until `wake`: a thread that some text has left behind does nothing while nobody asks."""
        if sys.platform != "win32":
            self._child.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        if sys.platform != "win32":
            self._child.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End it, if it still lives, and reap it."""
        self._child.kill()
        self._wait(_REAP_SECONDS)
        self.pipe.close()

    def cause(self) -> str:
        """By what it ended, in words, once its pipe has ended. It is reaped then."""
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
    # Not from the current folder (-P): a file there may have the name of a library.
    command = [sys.executable, "-P", "-m", _PROGRAM]
    if sys.platform == "win32":
        child = subprocess.Popen(
            [*command, "stdin", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        if child.stdin is not None:
            with child.stdin:
                child.stdin.write(theirs.share(child.pid))
    else:
        child = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
            cwd="/",
            start_new_session=True,  # Ctrl-C in a terminal is the node's business
        )
    return child


def environment_for(folders: Sequence[Path]) -> dict[str, str]:
    """Little of ours: tokens and passwords stand in environments."""
    handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    paths = os.pathsep.join(str(folder.resolve()) for folder in folders)
    own_packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {**handed_on, **own_packages, **_SET, **({"PYTHONPATH": paths} if paths else {})}


def _cause(code: int) -> str:
    if code == OUT_OF_MEMORY:
        return "it took more memory than it is allowed"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return _WORDS.get(name, f"its process was killed by {name}")
