"""Processes that pull until they are killed: `python -m tests.weights.pull_crash_points FOLDER
KILLS SEED`.

Each life is a fork with a leader and a follower on a network in memory, stores on disk, and ends by
SIGKILL: at a random moment, or at one of its touches of the disk. After each, the follower's store
is held against what it promised.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import trio

from echo_node.net.memory import MemorySwarm
from echo_node.weights import puller as pull
from protocol import limits
from tests.weights.crash_points import VERSIONS, check, live_and_die
from tests.weights.keys import LEADER
from tests.weights.stores import opened, publish
from tests.weights.swarms import offering, pulling


def pull_for_ever(folder, promise, luck) -> None:
    """By memory or by files, to versions of its choice, until it is at the newest."""
    pull.SMALL_BYTES = luck.choice([0, 4 << 20])

    async def main() -> None:
        with opened(folder.parent / "leader", durable=False) as leader:
            async with (
                MemorySwarm() as swarm,
                offering(swarm.join, leader),
                pulling(swarm.join, folder, durable=True, versions=luck.randint(1, 4)) as puller,
            ):
                await puller.chain.ask(LEADER.public)
                while True:
                    version = puller.held.message.version if puller.held else -1
                    if version == VERSIONS - 1:
                        return
                    wanted = min(version + luck.randint(1, 4), VERSIONS - 1)
                    await puller.pull(leader.follower.heads[wanted].id)
                    promise(puller.held.id)

    trio.run(main)


def main(folder: Path, kills: int, seed: int) -> None:
    limits.CHUNK_ELEMENTS = 64
    luck, done, lives, furthest = random.Random(seed), 0, 0, -1
    with opened(folder.parent / "leader", durable=False) as leader:
        publish(leader, VERSIONS)
    seen: dict[int, bytes] = {}
    while done < kills:
        promised, killed = live_and_die(pull_for_ever, folder, luck)
        done, lives = done + killed, lives + 1
        reached = check(folder, promised, seen)
        furthest = max(furthest, reached)
        if reached == VERSIONS - 1:
            shutil.rmtree(folder)
    while live_and_die(pull_for_ever, folder, luck)[1]:  # whatever is left goes on to the end
        pass
    sys.stdout.write(f"{done} kills, {lives} lives, version {furthest}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
