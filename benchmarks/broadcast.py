"""Seconds until eight followers have a trainer's new anchor, at 20 MB/s up per node.

Every node is a process with a libp2p host on the loopback and a store on disk. The ideal is a
pipeline in which the trainer sends every byte once: the model's bytes over one node's uplink.
One-to-many is the same download, of the same bytes, from the trainer alone, to all followers at
once. Then a version in which 1 % of the weights changed is published, and the clock stops when all
have applied it. A follower has a version when its store holds it, proven. Nine stores on one disk
would measure that disk, so they are in memory where the system has a folder there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MB = 1_000_000
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there


class NodeProcess:
    """A node process that takes commands as lines of JSON."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.broadcast_node", json.dumps(settings)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, do: str, **what: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"a node ended: {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.order(do, **what)
        return self.hear()

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@contextmanager
def nodes(folder: Path, followers: int, uplink: float, megabytes: int) -> Iterator[list[NodeProcess]]:
    """Start the trainer, then the followers with its address."""
    settings = {"uplink": uplink, "megabytes": megabytes}
    with ExitStack() as stack:

        def start(**more: Any) -> NodeProcess:
            process = NodeProcess({**settings, **more})
            stack.callback(process.end)
            return process

        trainer = start(number=0, folder=str(folder / "trainer"), seeds=[])
        started = trainer.hear()
        rest = [
            start(number=n, folder=str(folder / f"follower-{n}"), seeds=started["addresses"])
            for n in range(1, followers + 1)
        ]
        keys = [process.hear()["public"] for process in rest]
        for process in rest:
            process.ask("meet", peers=[started["public"], *(key for key in keys)])
        yield [trainer, *rest]


def all_do(processes: list[NodeProcess], do: str, **what: Any) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds until the last has done it, and their replies."""
    began = time.monotonic()
    for process in processes:
        process.order(do, **what)
    answers = [process.hear() for process in processes]
    return time.monotonic() - began, answers


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--followers", type=int, default=8)
    options.add_argument("--megabytes", type=int, default=200)
    options.add_argument("--uplink", type=float, default=20.0, help="MB/s of each node")
    options.add_argument(
        "--swarm-only", action="store_true", help="leave out one-to-many, which takes longest"
    )
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory(
            prefix="echo-broadcast-", dir=MEMORY if MEMORY.is_dir() else None
        ) as folder,
        nodes(Path(folder), given.followers, given.uplink * MB, given.megabytes) as (trainer, *followers),
    ):
        trainer.ask("publish", change=1.0)
        swarm, answers = all_do(followers, "pull", version=0)
        delta_bytes = trainer.ask("publish", change=0.01, gossip=False)["delta_bytes"]
        began = time.monotonic()
        trainer.ask("gossip")
        all_do(followers, "pull", version=1)
        delta = time.monotonic() - began
        one_to_many = 0.0 if given.swarm_only else all_do(followers, "fetch_from_trainer")[0]
    ideal = given.megabytes / given.uplink
    table = Table(
        title=f"{given.megabytes} MB to {given.followers} followers, {given.uplink:g} MB/s up for each node"
    )
    for column in ("", "seconds", "against the swarm"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("swarm, the last follower", f"{swarm:.1f}", "")
    table.add_row(
        "swarm, the median follower", f"{statistics.median(each['seconds'] for each in answers):.1f}", ""
    )
    table.add_row("ideal pipeline", f"{ideal:.1f}", f"{swarm / ideal:.2f} times as long")
    table.add_row("one to many", f"{one_to_many:.1f}", f"{one_to_many / swarm:.2f} times as fast")
    table.add_row(f"1 % delta of {delta_bytes / MB:.2f} MB, all applied", f"{delta:.2f}", "")
    Console().print(table)
    print(
        json.dumps(
            {
                "over_one_to_many": round(one_to_many / swarm, 3),
                "over_ideal": round(swarm / ideal, 3),
                "swarm_seconds": round(swarm, 2),
                "ideal_seconds": round(ideal, 2),
                "one_to_many_seconds": round(one_to_many, 2),
                "delta_seconds": round(delta, 3),
                "delta_mb": round(delta_bytes / MB, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
