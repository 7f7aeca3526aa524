"""Start a command in many processes that find each other: `torchrun`, on this machine, over loopback.

`python -m echo_node.trainer.launching N COMMAND…` does the same from a shell. It knows nothing of what the processes do, and
imports no torch: a command can ask which rank it is before it pays for that.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from echo_node.engine.pulse import die_with
from echo_node.errors import ConfigError

MOST: Final = 64
GRACE_SECONDS: Final = 45.0
"""`torchrun` itself waits half a minute for ranks that do not end."""
_OURSELVES: Final = "echo_node.trainer.launching"
_UNDER: Final = "--under"
"""Marks the process that becomes `torchrun`, and names its parent."""


def rank() -> int:
    """Which of the processes this is; 0 also where there is only one. `torchrun` says it through the environment."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which of those on this machine it is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def relaunch(nproc: int, argv: Sequence[str]) -> int:
    """Run a command in so many ranks, wait for them, and return the exit code: 0 where each had it.

    `argv` is a Python script with its arguments, as `sys.argv` is, or `-m` and a module with its own. One rank that
    fails ends all. Being interrupted or terminated is handed on to them.
    """
    if not 1 <= nproc <= MOST:
        raise ConfigError(f"{nproc} processes are not from 1 to {MOST}")
    command = [
        *(sys.executable, "-m", _OURSELVES, _UNDER, str(os.getpid())),
        *("--nnodes", "1", "--nproc-per-node", str(nproc), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", secrets.token_hex(8)),
        *("--local-addr", "127.0.0.1"),
        *argv,
    ]
    with subprocess.Popen(command, env=_environment()) as ranks, _handing_on(ranks):
        while True:
            try:
                code = ranks.wait()
            except KeyboardInterrupt:  # a terminal has told the ranks as well
                continue
            return code if code >= 0 else 128 - code


def _environment() -> dict[str, str]:
    """Ours; ranks of one machine listen to nobody else, and set their number of threads themselves."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    told = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})}
    return {**told, **os.environ}


@contextmanager
def _handing_on(ranks: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let who asks us to end ask the ranks, for as long as the block lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def end(_number: int, _frame: object) -> None:
        ranks.terminate()
        killer = threading.Timer(GRACE_SECONDS, ranks.kill)
        killer.daemon = True
        killer.start()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _become_torchrun(parent: int, arguments: Sequence[str]) -> None:
    """Be `torchrun`, and end when the parent does, however it ends: ranks that nobody waits for must not train on."""
    from torch.distributed.run import main  # noqa: PLC0415 - whoever launches needs no torch

    die_with(parent)
    main(list(arguments))


if __name__ == "__main__":
    if sys.argv[1] == _UNDER:
        _become_torchrun(int(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(relaunch(int(sys.argv[1]), sys.argv[2:]))
