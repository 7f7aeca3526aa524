"""Nodes in a process of their own, driven over a socket, one JSON object a line.

Commands come in; the greeting and the answers go out. The process ends when the socket does, so
that nobody who started it leaves it behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from echo_node.net.base import ACCEPT, RequestError
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity, TrajectoryGroup, open_sealed, seal
from tests.net.behaviour import TOPIC

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ARRIVALS = 100_000


class Node:
    """One node, and what it was told to keep an eye on. Each public method is a command."""

    def __init__(self, identity, network, nursery):
        self._identity = identity
        self._network = network
        self._nursery = nursery
        self._arrived = []
        self._sent = []

    async def where(self):
        return {"public": self._network.public.hex(), "addresses": self._network.addresses}

    async def peers(self):
        return sorted(peer.hex() for peer in self._network.peers())

    async def known(self):
        """Everyone that this node could turn to: connected, or heard of."""
        return sorted(peer.hex() for peer in {*self._network.peers(), *self._network.known()})

    async def counts(self):
        return dict(self._network.counts())

    async def scores(self):
        return {peer.hex(): dict(faults) for peer, faults in self._network.scores().items()}

    async def mutes(self):
        return {peer.hex(): dict(mute.reasons) for peer, mute in self._network.mutes().items()}

    async def subscribers(self, topic=TOPIC):
        """How many connected peers listen to a topic, as far as this node has heard."""
        return len(self._network._gossip.subscribers(topic))

    async def subscribe(self, topic=TOPIC, *, sealed=False, capacity=1024):
        """Keep what arrives.

        A topic of sealed groups keeps who signed which slot, and opens the seals.
        """
        from tests.protocol.examples import (
            RUN,
        )  # not at the top: a cold start is measured, and these take long

        def validate(message):
            if sealed:
                open_sealed(message.data, TrajectoryGroup, RUN)
            return ACCEPT

        async def read(task_status):
            async with self._network.subscribe(topic, validate, capacity=capacity) as inbox:
                task_status.started()
                async for message in inbox:
                    at = time.monotonic()
                    if sealed:
                        opened = open_sealed(message.data, TrajectoryGroup, RUN)
                        self._arrived.append((opened.signer.hex(), opened.message.slot, at))
                    else:
                        self._arrived.append((message.sender.hex(), message.data.hex(), at))
                    assert len(self._arrived) < ARRIVALS

        await self._nursery.start(read)

    async def arrived(self):
        return self._arrived

    async def publish(self, data, topic=TOPIC):
        await self._network.publish(topic, bytes.fromhex(data))

    async def flow(self, start, interval, count, topic=TOPIC):
        """Sealed groups of 1 kB at set times of the machine's clock, however long each takes."""
        from tests.protocol.examples import RUN, group

        one = group(completions=2, tokens=58)
        for n in range(count):
            await trio.sleep(max(0.0, start + n * interval - time.monotonic()))
            data = seal(dataclasses.replace(one, slot=n), self._identity, RUN)
            self._sent.append((n, time.monotonic()))
            await self._network.publish(topic, data)
        return self._sent

    async def serve_echo(self, stream, most=1024):
        async def echo(_peer, data):
            await trio.lowlevel.checkpoint()
            return data

        async def hold(task_status):
            with self._network.serve(stream, echo, most=most):
                task_status.started()
                await trio.sleep_forever()

        await self._nursery.start(hold)

    async def request(self, peer, stream, data, deadline=5.0, most=1 << 20):
        answer = await self._network.request(
            bytes.fromhex(peer), stream, bytes.fromhex(data), deadline=deadline, most=most
        )
        return answer.hex()

    async def provide(self, key):
        await self._network.provide(bytes.fromhex(key))

    async def find(self, key, count=8, deadline=10.0):
        began = time.monotonic()
        found = await self._network.find(bytes.fromhex(key), count, deadline=deadline)
        return {"found": [peer.hex() for peer in found], "seconds": time.monotonic() - began}


class Talk:
    """The way to whoever started the process."""

    def __init__(self, stream):
        self._stream = stream
        self._turn = trio.Lock()

    async def say(self, what):
        async with self._turn:
            await self._stream.send_all(json.dumps(what).encode() + b"\n")

    async def lines(self):
        rest = b""
        async for chunk in self._stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)

    async def close(self):
        await self._stream.aclose()


async def obey(nodes, order, talk):
    number, node, do = order.pop("number"), order.pop("node"), order.pop("do")
    try:
        assert not do.startswith("_")
        await talk.say({"number": number, "answer": await getattr(nodes[node], do)(**order)})
    except RequestError as error:
        await talk.say({"number": number, "refused": error.reason, "text": str(error)})


async def run(connection, settings):
    talk = Talk(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
    began = time.monotonic()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        nodes = []
        for key in settings["keys"]:
            identity = Identity(bytes.fromhex(key))
            swarm = SwarmSettings(listen=(LOOPBACK,), seeds=tuple(settings["seeds"]))
            network = await stack.enter_async_context(join_swarm(identity, swarm))
            nodes.append(Node(identity, network, nursery))
            settings["seeds"] = settings["seeds"] or network.addresses[:1]
        places = [await node.where() for node in nodes]
        await talk.say({"nodes": places, "seconds": time.monotonic() - began})
        async for order in talk.lines():
            nursery.start_soon(obey, nodes, order, talk)
        nursery.cancel_scope.cancel()


def main(connection, settings, stderr):
    """Run until the other end of the connection closes. Errors go to a file."""
    with Path(stderr).open("ab") as file:
        os.dup2(file.fileno(), 2)
    trio.run(run, connection, settings)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), sys.argv[3])
