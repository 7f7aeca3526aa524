"""Programs in place of an engine's process, or of a node.

`python -m tests.engine.strangers WHAT …`

As an engine they are given the pipe and the parent, as `echo_node.engine.worker.main` is.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from pathlib import Path

import numpy as np
from safetensors import deserialize

from echo_node.engine.base import SamplingLimits, SlotRequest, TensorBytes
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.worker.client import WorkerEngine
from echo_node.engine.worker.process import EngineProcess
from echo_node.engine.worker.watchdog import Watchdog
from echo_node.runtime.ipc import Pipe

HEAD = b"h" * 32


def main() -> None:
    what = os.environ.get("STRANGER") or sys.argv[1]
    globals()[what]()


def babbling() -> None:
    """Answer whatever comes with bytes that mean nothing."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.recv(10)
    end.sendall(random.Random(int(os.environ["SEED"])).randbytes(5_000))
    end.recv(2**20)
    time.sleep(60)


def crashing() -> None:
    """Go, with a word."""
    sys.stderr.write("a pipe burst\n" * 500)
    sys.exit(9)


def growing() -> None:
    """Take more and more memory, under the eyes of the pulse alone."""
    end = socket.socket(fileno=int(sys.argv[1]))
    Watchdog(Pipe(end), parent=os.getppid(), memory_bytes=200 * 2**20).start()
    taken = []
    while True:
        taken.append(b"x" * 2**20)
        time.sleep(0.001)


def leaving() -> None:
    """A node that starts an engine's process and ends without a word to it."""
    process = EngineProcess(dict(os.environ))
    sys.stdout.write(f"{process.pid}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def generating() -> None:
    """A node that generates for a long time."""
    folder = Path(sys.argv[3])
    engine = WorkerEngine(EngineSpec(sys.argv[2], folder, device="cpu", rows=4, threads=1))
    raw = deserialize((folder / "model.safetensors").read_bytes())
    engine.load(
        HEAD, {name: TensorBytes("bf16", tuple(each["shape"]), bytes(each["data"])) for name, each in raw}
    )
    limits = SamplingLimits(4000, 1.0, frozenset(), 32)
    short = SamplingLimits(1, 1.0, frozenset(), 32)
    prompt = np.array([1, 2, 3])
    requests = [SlotRequest(prompt, b"k" * 32, 1, short), SlotRequest(prompt, b"k" * 32, 3, limits)]
    for _ in engine.generate(requests):
        sys.stdout.write(f"{engine.pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
