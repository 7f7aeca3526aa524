"""Delay pushed groups until they are as old as the staleness bound allows.

In one process groups would be trained on at nearly no age, whatever the bound. Here a step gets its
batch only when as many groups of the newest version have been drawn, twice as many in the first S
steps; it gets the oldest that wait. So S batches are always under way, and groups are S steps old
when they are used. What has grown older is lost: samplers make a little more than is wanted. It
knows samplers and the trainer by their messages alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from benchmarks.convergence_task import BATCH
from echo_node.net.base import Network, RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.telemetry.metrics import Records, StepRecord
from protocol import (
    Delivery,
    Identity,
    TrajectoryGroup,
    decode,
    fill_batches,
    read_batch,
    topics,
    write_batch,
)

MOST_BATCHES = 32
"""Most groups that wait here at once; beyond that the oldest are lost."""
PATIENCE = 20.0
"""Seconds without news after which the trainer gets the groups there are."""


class Mail(Records):
    """The steps of a run, and what its samplers have sent and the trainer has not got yet."""

    def __init__(self, run: bytes, staleness: int) -> None:
        super().__init__()
        self._run = run
        self._staleness = staleness
        self._topic = topics.topic(run, topics.GROUPS)
        self._waiting: deque[tuple[Network, int, bytes]] = deque(maxlen=MOST_BATCHES * BATCH)
        """Sampler, step of the policy, and the sealed group."""
        self._ages: dict[bytes, int] = {}
        """The step of each head."""
        self._news = trio.Event()
        self._wanted = BATCH
        self._ripe = False
        """Whether the batch of this step may go."""
        self.lost = 0
        """Groups that grew too old here."""

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    def add(self, record: StepRecord) -> None:
        super().add(record)
        self._ages[record.head] = record.step
        self._wanted = BATCH
        self._ripe = False
        self._tell()

    @asynccontextmanager
    async def join(self, swarm: MemorySwarm, identity: Identity) -> AsyncGenerator[Network]:
        """Join a sampler to the swarm behind this delay."""
        async with swarm.join(identity) as network:
            yield cast("Network", _Behind(self, network))

    async def post(self, network: Network, topic: str, data: bytes) -> None:
        """Take what a sampler publishes: groups wait here, everything else goes on at once."""
        if topic != self._topic:
            await network.publish(topic, data)
            return
        for envelope in read_batch(data):
            if is_announcement(envelope):
                await network.publish(topic, write_batch([envelope.sealed]))
                continue
            head = envelope.claim(TrajectoryGroup, self._run).heads[0]
            # A head without a step of its own, such as the first, is of the step that was the last.
            self._waiting.append((network, self._ages.setdefault(head, self.step), envelope.sealed))
        await trio.lowlevel.checkpoint()
        self._tell()

    def holds_back(self, question: bytes) -> bool:
        """Return whether a direct delivery holds groups, which must wait for the mail."""
        return decode(Delivery, question).topic == self._topic

    async def carry(self) -> None:
        """Hand the trainer a batch for each step, the oldest first."""
        while True:
            due: dict[Network, list[bytes]] = {}
            while self._may_go():
                network, step, sealed = self._waiting.popleft()
                if self.step - step > self._staleness:
                    self.lost += 1
                    continue
                self._wanted -= 1
                due.setdefault(network, []).append(sealed)
            news = self._news
            for network, groups in due.items():
                for message in fill_batches(groups):
                    await network.publish(self._topic, message)
            with trio.move_on_after(PATIENCE) as patience:
                await news.wait()
            if patience.cancelled_caught:
                self._ripe, self._wanted = True, max(self._wanted, 1)

    def _may_go(self) -> bool:
        if self._wanted <= 0 or not self._waiting:
            return False
        if not self._ripe:
            fresh = sum(step == self.step for _, step, _ in self._waiting)
            self._ripe = fresh >= BATCH * (2 if self.step < self._staleness else 1)
        return self._ripe

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


class _Behind:
    """A network whose groups go by the mail; everything else is as it was."""

    def __init__(self, mail: Mail, network: Network) -> None:
        self._mail = mail
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def publish(self, topic: str, data: bytes) -> None:
        await self._mail.post(self._network, topic, data)

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        if stream == topics.DELIVER_STREAM and self._mail.holds_back(data):
            raise RequestError("unreachable", "groups go by the mail, which is slow")
        return await self._network.request(peer, stream, data, deadline=deadline, most=most)
