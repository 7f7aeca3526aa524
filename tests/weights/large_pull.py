"""Pull a large state from a leader on a network in memory: `python -m tests.weights.large_pull
FOLDER MEGABYTES`.

`tests.weights.large publish` has made the leader's store. It prints the most bytes that the process
held, both nodes together, and the seconds that an anchor and a delta took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import trio

from echo_node.net.memory import MemorySwarm
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import Rules, blob_id, encode
from tests.weights.keys import FOLLOWER, LEADER, RUN
from tests.weights.large import layout, most_resident
from tests.weights.swarms import offering


async def main(folder: Path, megabytes: int) -> None:
    told = layout(megabytes)
    root = (folder / "root").read_bytes()
    run = Rules(RUN, blob_id(encode(told)), root, (LEADER.public,), (LEADER.public,))
    took = []
    with (
        WeightsStore.open(folder / "leader", run, told, durable=False) as leader,
        WeightsStore.open(folder / "puller", run, told) as store,
    ):
        async with MemorySwarm() as swarm, offering(swarm.join, leader), swarm.join(FOLLOWER) as network:
            puller = Puller(network, store)
            await puller.chain.ask(LEADER.public)
            for head in leader.follower.heads:
                start = time.perf_counter()
                await puller.pull(head.id)
                took.append(round(time.perf_counter() - start, 2))
        assert store.tip == leader.tip
    sys.stdout.write(json.dumps({"most": most_resident(), "took": took}) + "\n")


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
