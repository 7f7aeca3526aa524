"""A process that fills an outbox until it is killed: `python -m tests.net.crash_points PATH LIFE`.

Each line that it prints names a call that had returned.
"""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import trio

from echo_node.net.outbox.outbox import open_outbox
from tests.net.delivery_fixtures import item, sized

ROOT = Path(__file__).parents[2]
A_LIFE = 1_000_000
"""Numbers of items that one life has for itself."""


def report(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def fill_outbox(path, life):
    luck = random.Random(life)
    async with open_outbox(path) as outbox:
        n = life * A_LIFE
        while True:
            batch = range(n, n + luck.randint(1, 4))
            n = batch.stop
            await outbox.put([sized(each) for each in batch])
            for each in batch:
                report("put", each)
            chosen = luck.choice(batch)
            if luck.random() < 0.3:
                report("acknowledging", chosen)
                await outbox.acknowledge([item(chosen).id])
                report("acknowledged", chosen)


@contextmanager
def start(path, life):
    command = [sys.executable, "-m", "tests.net.crash_points", str(path), str(life)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def run_and_kill(path, life, *, after):
    """Return the lines of a process that is killed at any moment after `after` of them."""
    with start(path, life) as child:
        lines = [child.stdout.readline() for _ in range(after)]
        child.kill()
        lines += child.stdout.readlines()
    whole = [line.split() for line in lines if line.endswith("\n")]
    return [(word, int(n)) for word, n in whole]


if __name__ == "__main__":
    trio.run(fill_outbox, Path(sys.argv[1]), int(sys.argv[2]))
