"""Fork server: trainers without the wait for the imports of Python and torch.

    with hatchery() as hatch:
        process = await hatch(words, stderr)    # has what `NodeProcess` needs of `trio.Process`

A fork runs `echo-node` with its command line. An exit code is not reported: the forks are there to
be killed.
`python -m tests.swarm.fork_server SOCKET` is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import trio

ROOT = Path(__file__).parents[2]
LOADED = (
    "echo_node.cli.main",
    "echo_node.cli.session",
    "echo_node.trainer.loop",
    "echo_node.trainer.standby",
    "echo_node.trainer.distributed",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What a trainer of the embedded model imports on its way."""
BYTES = 65_536
LOAD_SECONDS = 300.0


class Hatched:
    """A process that another one has forked."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.stdout = trio.lowlevel.FdStream(told)
        self.returncode: int | None = None
        self._watched = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._watched, number)
        if number == signal.SIGKILL:
            self.returncode = -number

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Whatever it ended with, if not by a kill, is an error."""
        if self.returncode is None and select.select([self._watched], [], [], 0)[0]:
            self.returncode = 1
        return self.returncode

    async def wait(self) -> int | None:
        await trio.lowlevel.wait_readable(self._watched)
        return self.returncode


@contextmanager
def hatchery() -> Iterator[Callable[[Sequence[str], IO[bytes]], Awaitable[Hatched]]]:
    """What forks a process with these words, and its errors there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LOAD_SECONDS)
    with theirs:
        mother = subprocess.Popen(
            [sys.executable, "-m", "tests.swarm.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
    with mother, ours:  # it ends with the socket
        yield partial(_hatch, ours)


async def _hatch(mother: socket.socket, words: Sequence[str], stderr: IO[bytes]) -> Hatched:
    told, telling = os.pipe()
    try:
        socket.send_fds(mother, [json.dumps(list(words)).encode()], [telling, stderr.fileno()])
        return Hatched(int(await trio.to_thread.run_sync(mother.recv, BYTES)), told)
    finally:
        os.close(telling)


def main(place: int) -> None:
    """Fork for whoever asks at this socket, until nobody is there any more."""
    for name in LOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    with socket.socket(fileno=place) as asked:
        while True:
            words, streams, *_ = socket.recv_fds(asked, BYTES, 2)
            if not words:
                return
            child = os.fork()
            if not child:
                asked.close()
                _be(json.loads(words), *streams)
            for each in streams:
                os.close(each)
            asked.send(str(child).encode())


def _be(words: Sequence[str], told: int, stderr: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for given, number in ((told, 1), (stderr, 2)):
        os.dup2(given, number)
        os.close(given)
    # The streams of before know what they were opened on.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = ["echo-node", *words]
    from echo_node.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main(int(sys.argv[1]))
