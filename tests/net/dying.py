"""A process that keeps things and says so, until it is killed: `python -m tests.net.dying outbox PATH LIFE`.

Each line that it prints is a promise: the call that the line names had returned.
"""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import trio

from echo_node.net.outbox.arrivals import open_arrivals
from echo_node.net.outbox.outbox import open_outbox
from tests.net.post import item, sized

ROOT = Path(__file__).parents[2]
A_LIFE = 1_000_000
"""Numbers of items that one life has for itself."""


def say(*words):
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
                say("put", each)
            chosen = luck.choice(batch)
            if luck.random() < 0.3:
                say("acknowledging", chosen)
                await outbox.acknowledge([item(chosen).id])
                say("acknowledged", chosen)


async def fill_arrivals(path, life):
    luck = random.Random(life)
    async with open_arrivals(path) as arrivals:
        n = life * A_LIFE
        while True:
            batch = range(max(life * A_LIFE, n - luck.randint(0, 3)), n + luck.randint(1, 4))
            n = batch.stop
            new = {each.id for each in await arrivals.take([sized(each) for each in batch])}
            for each in batch:
                say("new" if item(each).id in new else "known", each)
            chosen = luck.choice(batch)
            if luck.random() < 0.3:
                say("finishing", chosen)
                await arrivals.done([item(chosen).id])
                say("finished", chosen)


@contextmanager
def start(what, path, life):
    command = [sys.executable, "-m", "tests.net.dying", what, str(path), str(life)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def run_and_kill(what, path, life, *, after):
    """What a process said before it was killed, at any moment after so many lines."""
    with start(what, path, life) as child:
        lines = [child.stdout.readline() for _ in range(after)]
        child.kill()
        lines += child.stdout.readlines()
    whole = [line.split() for line in lines if line.endswith("\n")]
    return [(word, int(n)) for word, n in whole]


if __name__ == "__main__":
    keep = {"outbox": fill_outbox, "arrivals": fill_arrivals}[sys.argv[1]]
    trio.run(keep, Path(sys.argv[2]), int(sys.argv[3]))
