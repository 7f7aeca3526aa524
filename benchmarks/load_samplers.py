"""Simulated samplers of the load benchmark, several in one process.

Keys, joins, sockets, signatures and receipts are real.

Only the engine is missing: groups of the right prompts with made-up answers are sealed before the
clock starts. Each sampler sends a burst when it is due, by gossip, unless as many groups as a
sampler of ours would allow are unanswered; what no receipt names within two seconds it delivers by
hand.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from typing import Any, Final

import numpy as np
import trio

from benchmarks.load_run import (
    BURST,
    ENGINE,
    UNANSWERED,
    Orders,
    identity,
    obey,
    open_run,
    read_orders,
    say,
    swarm_settings,
)
from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, Message, Network
from echo_node.net.libp2p import join_swarm
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.runs.run import Run
from protocol import (
    Envelope,
    Identity,
    Join,
    Receipt,
    TrajectoryGroup,
    WeightsHead,
    fill_batches,
    open_sealed,
    seal,
    topics,
)
from protocol.digest import ZERO
from protocol.trajectory import Completion, Stretch

MOMENT: Final = 2.0
"""After which a group without a receipt goes by hand, as in `Patience`."""
JOIN_SECONDS: Final = 30.0
DELIVER_SECONDS: Final = 20.0
CALM: Final = 0.02


class GroupMaker:
    """Seal groups of one sampler under one head, with made-up answers."""

    def __init__(self, run: Run, who: Identity, head: bytes) -> None:
        self._run = run
        self._who = who
        self._head = head
        self._luck = np.random.default_rng(int.from_bytes(who.public[:8]))
        self._next = 0

    def make(self, count: int, *, first: int | None = None) -> list[bytes]:
        start = self._next if first is None else first
        slots = range(start, start + count)
        self._next = slots.stop
        keys = [self._run.slot_key(self._head, self._who.public, slot) for slot in slots]
        asked = self._run.prompts(keys)
        return [self._sealed(slot, ids) for slot, (_, ids) in zip(slots, asked, strict=True)]

    def _sealed(self, slot: int, prompt: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
        limits = self._run.limits
        (end,) = limits.end_tokens
        completions = []
        for _ in range(self._run.manifest.sampling.group_size):
            ids = self._luck.integers(0, limits.vocab_size - 1, limits.max_tokens)
            ids[ids == end] = limits.vocab_size - 1
            ids[-1] = end
            logprobs = -self._luck.random(limits.max_tokens)
            completions.append(Completion(ids, logprobs, "end", 0.0, (Stretch(0, len(ids), 0),)))
        group = TrajectoryGroup.of(
            prompt=prompt,
            completions=completions,
            engine=ENGINE,
            heads=(self._head,),
            slot=slot,
            vocabulary=limits.vocab_size,
        )
        return seal(group, self._who, self._run.id)


class SimulatedSampler:
    """One sampler: it has joined, and pushes what was made."""

    def __init__(self, run: Run, who: Identity, network: Network) -> None:
        self._run = run
        self._who = who
        self._network = network
        self._leader = run.manifest.trainers[0]
        self._topic = topics.topic(run.id, topics.GROUPS)
        self._maker: GroupMaker | None = None
        self._made: deque[bytes] = deque()
        self._sent: dict[bytes, tuple[float, bytes]] = {}
        """Groups that no receipt has named: when they were pushed, and their bytes."""
        self._by_hand_at: dict[bytes, float] = {}
        self._news = trio.Event()
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self.latencies: list[float] = []
        self.refused: Counter[str] = Counter()
        self.pushed = self.payload = self.body = self.by_hand = 0
        self.held_back = 0.0
        """Seconds that bursts were late, since too much was unanswered."""
        self.last_receipt = 0.0
        self.answered_in_time = 0
        self.deadline = 0.0

    async def join(self) -> None:
        sealed = seal(Join(agent="load", engine=ENGINE, head=ZERO, name=""), self._who, self._run.id)
        topic = topics.topic(self._run.id, topics.JOINS)
        with trio.fail_after(JOIN_SECONDS):
            while True:
                try:
                    await deliver(self._network, self._leader, topic, sealed, deadline=10.0, most=0)
                except PeerError:
                    await trio.sleep(0.2)
                else:
                    return

    def prepare(self, head: bytes, count: int) -> None:
        if self._maker is None:
            self._maker = GroupMaker(self._run, self._who, head)
        self._made.extend(self._maker.make(count))

    async def hear(self) -> None:
        """Take note of receipts."""
        topic = topics.topic(self._run.id, topics.RECEIPTS)
        async with self._network.subscribe(topic, lambda _: ACCEPT) as receipts:
            async for message in receipts:
                self._settle(message.data)

    async def push(self, start: float, interval: float, bursts: int) -> None:
        for number in range(bursts):
            due = start + number * interval
            await trio.sleep(max(0.0, due - time.monotonic()))
            waited = time.monotonic()
            while len(self._sent) + BURST > UNANSWERED:
                await self._news.wait()
            self.held_back = max(self.held_back, time.monotonic() - max(waited, due))
            await self._burst()

    async def redeliver(self) -> None:
        while True:
            await trio.sleep(0.25)
            now = time.monotonic()
            late = [
                (group, sealed)
                for group, (at, sealed) in self._sent.items()
                if now - self._by_hand_at.get(group, at) > MOMENT
            ]
            for group, _ in late:
                self._by_hand_at[group] = now
            self.by_hand += len(late)
            for batch in fill_batches([sealed for _, sealed in late]):
                try:
                    answer = await deliver(
                        self._network, self._leader, self._topic, batch, deadline=DELIVER_SECONDS
                    )
                except PeerError:
                    continue
                if answer:
                    self._settle(answer)

    @property
    def unanswered(self) -> int:
        return len(self._sent)

    async def _burst(self) -> None:
        groups = [self._made.popleft() for _ in range(BURST)]
        now = time.monotonic()
        for sealed in groups:
            envelope = Envelope.parse(sealed)
            self._sent[envelope.id] = (now, sealed)
            self.payload += len(sealed)
            self.body += len(envelope.body)
        self.pushed += len(groups)
        for batch in fill_batches(groups):
            await self._network.publish(self._topic, batch)

    def _settle(self, sealed: bytes) -> None:
        receipt = open_sealed(sealed, Receipt, self._run.id, signer=self._leader).message
        now = time.monotonic()
        for group in receipt.accepted_ids():
            if found := self._sent.pop(group, None):
                self.latencies.append(now - found[0])
                self._answered(now)
        for group, reason in receipt.refused_ids():
            if self._sent.pop(group, None):
                self.refused[reason] += 1
                self._answered(now)
        self._news.set()
        self._news = trio.Event()

    def _answered(self, now: float) -> None:
        self.last_receipt = now
        self.answered_in_time += now <= self.deadline


class Company:
    """The samplers of this process."""

    def __init__(self, run: Run, samplers: Sequence[SimulatedSampler], networks: Sequence[Network]) -> None:
        self._run = run
        self._samplers = samplers
        self._networks = networks
        self._head = b""
        self._heard = trio.Event()

    async def hear_heads(self, network: Network) -> None:
        """Wait for the second head, whose roster has every sampler."""

        def look(message: Message) -> Any:
            head = open_sealed(message.data, WeightsHead, self._run.id)
            if head.message.version >= 1:
                self._head = head.id
                self._heard.set()
            return ACCEPT

        async with network.subscribe(topics.topic(self._run.id, topics.HEADS), look) as heads:
            async for _ in heads:
                pass

    async def join(self) -> dict[str, Any]:
        for each in self._samplers:
            await each.join()
        return {}

    async def prepare(self, bursts: int) -> dict[str, Any]:
        with trio.fail_after(JOIN_SECONDS):
            await self._heard.wait()
        for each in self._samplers:
            await trio.to_thread.run_sync(each.prepare, self._head, bursts * BURST)
        return {}

    async def push(
        self, start: float, interval: float, bursts: int, phase: float, grace: float
    ) -> dict[str, Any]:
        """Push for so long, wait for what is unanswered, and return the figures."""
        ready, spent = time.monotonic(), time.process_time()
        async with trio.open_nursery() as nursery:
            for number, each in enumerate(self._samplers):
                each.begin()
                each.deadline = start + bursts * interval
                mine = start + (phase + number) / len(self._samplers) * interval
                nursery.start_soon(each.push, mine, interval, bursts)
        pushed = time.monotonic()
        with trio.move_on_after(grace):
            while any(each.unanswered for each in self._samplers):  # noqa: ASYNC110 -- receipts come by themselves
                await trio.sleep(CALM)
        return {
            "began_late": max(0.0, ready - start),
            "pushed": sum(each.pushed for each in self._samplers),
            "accepted": sum(len(each.latencies) for each in self._samplers),
            "in_time": sum(each.answered_in_time for each in self._samplers),
            "refused": dict(sum((each.refused for each in self._samplers), Counter())),
            "lost": sum(each.unanswered for each in self._samplers),
            "by_hand": sum(each.by_hand for each in self._samplers),
            "held_back": max(each.held_back for each in self._samplers),
            "payload": sum(each.payload for each in self._samplers),
            "body": sum(each.body for each in self._samplers),
            "latencies": [round(ms * 1000, 1) for each in self._samplers for ms in each.latencies],
            "pushed_at": pushed,
            "last_receipt": max(each.last_receipt for each in self._samplers),
            "cpu": time.process_time() - spent,
        }


async def work(given: Orders) -> None:
    with closing(open_run(jailed=False)) as run:
        async with AsyncExitStack() as stack:
            networks = [
                await stack.enter_async_context(join_swarm(identity(name), swarm_settings(given.seeds)))
                for name in given.names
            ]
            nursery = await stack.enter_async_context(trio.open_nursery())
            samplers = [
                SimulatedSampler(run, identity(name), network)
                for name, network in zip(given.names, networks, strict=True)
            ]
            company = Company(run, samplers, networks)
            nursery.start_soon(company.hear_heads, networks[0])
            for each in samplers:
                nursery.start_soon(each.hear)
                nursery.start_soon(each.redeliver)
            say({})
            await obey({"join": company.join, "prepare": company.prepare, "push": company.push})
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(work, read_orders())
