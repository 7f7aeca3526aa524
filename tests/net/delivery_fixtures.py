"""Shared by the tests of delivery: items, a sender and a receiver that can restart.

The receiver stands for a trainer: it takes items by gossip and by hand, keeps their ids in a file
and acknowledges them by replies, by gossip or by both. A receipt is a row of ids here, since the
network does not know receipts.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from contextlib import asynccontextmanager

import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.direct_delivery import Taker, serve_deliveries
from echo_node.net.outbox.outbox import Item, open_outbox
from echo_node.net.outbox.redelivery import Redelivery
from protocol import canonical, fill_batches, topics

RUN = bytes(32)
GROUPS, RECEIPTS = topics.topic(RUN, topics.GROUPS), topics.topic(RUN, topics.RECEIPTS)
FOREVER = 24 * 3600.0
"""Far more time, on a clock that jumps, than any delivery may take."""


def item(n: int, size: int = 200) -> Item:
    name = hashlib.sha256(b"item %d" % n).digest()
    return Item(name, GROUPS, (name * (size // 32 + 1))[:size])


def sized(n: int) -> Item:
    """An item whose length is its number's."""
    return item(n, 40 + n * 7919 % 9000)


def items(count: int, size: int = 200) -> list[Item]:
    return [item(n, size) for n in range(count)]


def ids(of) -> list[bytes]:
    return [each.id for each in of]


def pack(_topic, data):
    return fill_batches(data)


def unpack(data: bytes) -> list[Item]:
    return [Item(each[:32], GROUPS, each) for each in canonical.decode(data)]


def accept(_message):
    return ACCEPT


class Sender:
    """An outbox and its redelivery; `restarts` counts its lives."""

    def __init__(self, swarm, identity, path, *recipients, patience=None, seed=0):
        self.swarm, self.identity, self.path = swarm, identity, path
        self.recipients = list(recipients)
        self.patience = patience or Patience()
        self.luck = random.Random(seed)

    @asynccontextmanager
    async def life(self):
        async with (
            self.swarm.join(self.identity) as network,
            open_outbox(self.path) as outbox,
            network.subscribe(RECEIPTS, accept) as receipts,
            trio.open_nursery() as nursery,
        ):
            self.network, self.outbox = network, outbox
            self.redelivery = Redelivery(
                network,
                outbox,
                recipients=lambda: self.recipients,
                pack=pack,
                on_response=self.heard,
                patience=self.patience,
                luck=self.luck,
            )
            nursery.start_soon(self.redelivery.run)
            nursery.start_soon(self.read, receipts)
            await trio.testing.wait_all_tasks_blocked()
            yield self
            nursery.cancel_scope.cancel()

    async def heard(self, _peer, answer):
        if len(answer) % 32:
            raise PeerError("not a receipt")
        await self.outbox.acknowledge(answer[i : i + 32] for i in range(0, len(answer), 32))

    async def read(self, receipts):
        async for message in receipts:
            await self.heard(message.sender, message.data[8:])

    async def emptied(self):
        with trio.fail_after(FOREVER):
            while self.outbox.pending:  # noqa: ASYNC110 -- the outbox has no event for its end, and the clock jumps
                await trio.sleep(0.1)


class Receiver:
    """A file of ids behind a network. `handed` has the new ones of all its lives, each once."""

    def __init__(self, swarm, identity, path, *, answers=True, gossips=True):
        self.swarm, self.identity, self.path = swarm, identity, path
        self.answers, self.gossips = answers, gossips
        self.handed = []
        self.some = trio.Event()
        self.asked = Counter()
        self.lives = 0

    @asynccontextmanager
    async def life(self):
        self.lives += 1
        async with (
            self.swarm.join(self.identity) as network,
            network.subscribe(GROUPS, accept) as gossip,
            trio.open_nursery() as nursery,
        ):
            self.network, self.kept = network, self.read_file()
            nursery.start_soon(self.listen, gossip)
            with serve_deliveries(network, {GROUPS: Taker(accept, self.take)}):
                yield self
            nursery.cancel_scope.cancel()

    async def listen(self, gossip):
        async for message in gossip:
            self.asked["gossip"] += 1
            await self.acknowledge(await self.keep(message.data))

    async def take(self, message):
        self.asked["by hand"] += 1
        taken = await self.keep(message.data)
        await self.acknowledge(taken)
        return b"".join(taken) if self.answers else b""

    async def keep(self, data):
        """Return the ids that may be acknowledged, new or not."""
        received = list(dict.fromkeys(ids(unpack(data))))
        new = [each for each in received if each not in self.kept]
        with self.path.open("ab") as file:  # written before anything is acknowledged
            file.write(b"".join(new))
        self.kept.update(dict.fromkeys(new))
        self.handed += new
        self.some.set()
        return received

    def read_file(self):
        """Return the ids in the file, without the torn one that a kill may leave at its end."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: len(data) // 32 * 32]
        self.path.write_bytes(whole)
        return {whole[i : i + 32]: None for i in range(0, len(whole), 32)}

    async def acknowledge(self, taken):
        if self.gossips:
            nonce = random.randbytes(8)  # or gossip would drop a second equal receipt
            await self.network.publish(RECEIPTS, nonce + b"".join(taken))

    def waiting(self):
        return list(self.kept)
