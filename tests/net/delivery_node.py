"""A sender or a receiver of `post` as a process in a real swarm: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity
from tests.net.delivery_fixtures import Receiver, Sender, items

TELL_SECONDS = 0.1


class Swarm:
    """What `post` joins."""

    def __init__(self, settings):
        self._settings = settings

    def join(self, identity):
        return join_swarm(identity, self._settings)


def say(**what):
    print(json.dumps(what), flush=True)  # noqa: T201 -- it talks to the test


async def main(told):
    settings = SwarmSettings(listen=(told["listen"],), seeds=tuple(told["seeds"]), public=told.get("public"))
    identity = Identity(bytes([told["seed"]]) * 32)
    if "to" in told:
        node = Sender(Swarm(settings), identity, Path(told["path"]), bytes.fromhex(told["to"]))
    else:
        node = Receiver(Swarm(settings), identity, Path(told["path"]))
    async with node.life(), trio.open_nursery() as nursery:
        nursery.start_soon(tell, node)
        say(addresses=node.network.addresses)
        async for line in trio.wrap_file(sys.stdin):
            first, end = json.loads(line)["put"]
            for n in range(first, end, 20):
                await node.outbox.put(items(end)[n : min(n + 20, end)])
                say(put=min(n + 20, end))
        nursery.cancel_scope.cancel()


async def tell(node):
    while True:
        if isinstance(node, Sender):
            say(pending=node.outbox.pending, peers=len(node.network.peers()))
        else:
            say(waiting=[each.hex() for each in node.waiting()], peers=len(node.network.peers()))
        await trio.sleep(TELL_SECONDS)


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
