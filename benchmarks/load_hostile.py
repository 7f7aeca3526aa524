"""Hostile sampler of the load benchmark: joins, then sends all that the wire takes.

Every message is as long as may be and full of groups that are validly signed and of no use, since
their slots are far ahead: nothing that whoever passes them on could be blamed for. It gossips them,
and delivers others by hand at the same time. A message is never sent twice, or it would cost nobody
anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import trio

from benchmarks.load_run import Orders, identity, obey, open_run, read_orders, say, swarm_settings
from benchmarks.load_samplers import GroupMaker, SimulatedSampler
from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.runs.run import Run
from protocol import WeightsHead, limits, open_sealed, topics, write_batch

POOL: Final = 2_000
FAR_AHEAD: Final = 1_000_000
BY_HAND: Final = 16
"""Deliveries at a time."""
PAUSE: Final = 0.002
"""Between two messages, for the loop to write them."""
DELIVER_SECONDS: Final = 5.0


class Flood:
    """One peer's, while it lasts."""

    def __init__(self, run: Run, name: str, network: Libp2pNetwork) -> None:
        self._run = run
        self._who = identity(name)
        self._network = network
        self._leader = run.manifest.trainers[0]
        self._topic = topics.topic(run.id, topics.GROUPS)
        self._sampler = SimulatedSampler(run, self._who, network)
        self._pool: list[bytes] = []
        self._messages: Iterator[bytes] = iter(())
        self._heard = trio.Event()
        self._head = b""
        self._scope: trio.CancelScope | None = None
        self._gossiped = self._delivered = self._refused = 0
        self._nursery: trio.Nursery | None = None

    async def hear_heads(self) -> None:
        topic = topics.topic(self._run.id, topics.HEADS)
        async with self._network.subscribe(topic, lambda _: ACCEPT) as heads:
            async for message in heads:
                head = open_sealed(message.data, WeightsHead, self._run.id)
                if head.message.version >= 1:
                    self._head = head.id
                    self._heard.set()

    async def join(self) -> dict[str, Any]:
        await self._sampler.join()
        return {}

    async def prepare(self) -> dict[str, Any]:
        with trio.fail_after(30):
            await self._heard.wait()

        def make() -> list[bytes]:
            return GroupMaker(self._run, self._who, self._head).make(POOL, first=FAR_AHEAD)

        self._pool = await trio.to_thread.run_sync(make)
        self._messages = self._compose()
        return {}

    def _compose(self) -> Iterator[bytes]:
        """Ever new choices of the same groups: no two messages are the same bytes."""
        each = (limits.GOSSIP_BYTES - 16) // (max(map(len, self._pool)) + 5)
        for stride in range(1, POOL):
            for start in range(POOL):
                yield write_batch([self._pool[(start + n * stride) % POOL] for n in range(each)])

    async def begin(self) -> dict[str, Any]:
        assert self._nursery is not None
        self._gossiped = self._delivered = self._refused = 0
        self._scope = trio.CancelScope()
        self._nursery.start_soon(self._flood, self._scope)
        return {}

    async def end(self) -> dict[str, Any]:
        assert self._scope is not None
        self._scope.cancel()
        counts = self._network.counts()
        return {
            "gossiped": self._gossiped,
            "delivered": self._delivered,
            "refused": self._refused,
            "overflow": counts.get("overflow", 0),
            "at": time.monotonic(),
        }

    async def _flood(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._gossip)
                for _ in range(BY_HAND):
                    nursery.start_soon(self._deliver)

    async def _gossip(self) -> None:
        while True:
            await self._network.publish(self._topic, next(self._messages))
            self._gossiped += 1
            await trio.sleep(PAUSE)

    async def _deliver(self) -> None:
        while True:
            try:
                await deliver(
                    self._network, self._leader, self._topic, next(self._messages), deadline=DELIVER_SECONDS
                )
                self._delivered += 1
            except PeerError:
                self._refused += 1
                await trio.sleep(PAUSE)

    async def work(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.hear_heads)
            say({})
            await obey({"join": self.join, "prepare": self.prepare, "begin": self.begin, "end": self.end})
            nursery.cancel_scope.cancel()


async def work(given: Orders) -> None:
    with closing(open_run(jailed=False)) as run:
        (name,) = given.names
        async with join_swarm(identity(name), swarm_settings(given.seeds)) as network:
            await Flood(run, name, network).work()


if __name__ == "__main__":
    trio.run(work, read_orders())
