"""Start a command in many processes under `torchrun`, over loopback.

`python -m echo_node.trainer.torchrun N COMMAND…` does the same from a shell. No torch is imported
here: a command can ask for its rank without that cost.
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

from echo_node.engine.worker.watchdog import die_with
from echo_node.errors import ConfigError

MOST: Final = 64
GRACE_SECONDS: Final = 45.0
"""Seconds before `torchrun` is killed; it waits 30 s for its ranks itself."""
_MODULE: Final = "echo_node.trainer.torchrun"
_UNDER: Final = "--under"
"""Marks the process that becomes `torchrun`, and names its parent."""


def rank() -> int:
    """Return the rank of this process, from torchrun's environment; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Return the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the rank of this process on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def relaunch(nproc: int, argv: Sequence[str]) -> int:
    """Run a command in so many ranks, wait for them, and return the exit code.

    It is 0 where each rank had 0. `argv` is a Python script with its arguments, as `sys.argv` is,
    or `-m` and a module with its own. One rank that fails ends all. SIGINT and SIGTERM are passed
    on to them.
    """
    if not 1 <= nproc <= MOST:
        raise ConfigError(f"{nproc} processes are not from 1 to {MOST}")
    command = [
        *(sys.executable, "-m", _MODULE, _UNDER, str(os.getpid())),
        *("--nnodes", "1", "--nproc-per-node", str(nproc), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", secrets.token_hex(8)),
        *("--local-addr", "127.0.0.1"),
        *_positional(argv),
    ]
    with subprocess.Popen(command, env=_environment()) as ranks, _forwarding_sigterm(ranks):
        while True:
            try:
                code = ranks.wait()
            except KeyboardInterrupt:  # the terminal signals the ranks too
                continue
            return code if code >= 0 else 128 - code


def _positional(argv: Sequence[str]) -> list[str]:
    """Return the command behind `--`.

    Without it torchrun reads --log or --nproc as abbreviations of its own options.
    """
    flag, rest = (["-m"], argv[1:]) if argv[0] == "-m" else ([], argv)
    return [*flag, "--", *rest]


def _environment() -> dict[str, str]:
    """Return the environment of the ranks: loopback only, and one OpenMP thread.

    Ranks set their number of threads themselves.
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    defaults = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})}
    return {**defaults, **os.environ}


@contextmanager
def _forwarding_sigterm(ranks: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM on to the ranks for as long as the block lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread handles signals
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
    """Run `torchrun` in this process, and end with the parent, however it ends.

    Ranks that nobody waits for must not train on.
    """
    from torch.distributed.run import main  # noqa: PLC0415 - the launcher needs no torch

    die_with(parent)
    main(list(arguments))


if __name__ == "__main__":
    if sys.argv[1] == _UNDER:
        _become_torchrun(int(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(relaunch(int(sys.argv[1]), sys.argv[2:]))
