"""The standby buffer: groups that the leader accepted, as far as there is room."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.taken_groups import TakenGroups
from echo_node.storage.blob_dir import BlobDir
from echo_node.trainer.journal import open_journal
from echo_node.trainer.standby_buffer import StandbyBuffer
from protocol import Envelope, Inventory, Receipt, Refusal, encode, seal, topics, write_batch
from tests.crafting import (
    SAMPLERS,
    STRANGER,
    TRAINER,
    Chain,
    changed_run,
    forged,
    identity,
    open_run,
    roster,
    sealed_group,
)

HEIR, THIRD = identity("heir"), identity("a third trainer")
RUN = changed_run(open_run(staleness=1), trainers=(TRAINER.public, HEIR.public, THIRD.public))
GROUPS, RECEIPTS, INVENTORIES = (
    topics.topic(RUN.id, cargo) for cargo in (topics.GROUPS, topics.RECEIPTS, topics.INVENTORIES)
)
ANN, BOB = SAMPLERS[:2]
ROOM = 6


class Listening:
    """A trainer that overhears, the leader and two samplers."""

    def __init__(self, leader, sampler, journal, store, buffer, third):
        self.leader, self.sampler, self.journal, self.third = leader, sampler, journal, third
        self.buffer = buffer
        self._store, self._chain = store, Chain(RUN)
        self.publish()

    def publish(self):
        self.head = self._chain.next(ANN, BOB)
        heads = (*self._store.follower.heads, self.head)
        self._store.follower = SimpleNamespace(heads=heads, tip=self.head, leader=TRAINER.public)

    def group(self, slot, sampler=ANN):
        return sealed_group(RUN, self.head.id, sampler, slot)

    async def gossip(self, *sealed):
        await self.sampler.publish(GROUPS, write_batch(sealed))
        await self.settled()

    async def answer(self, *accepted, by=TRAINER, **refused):
        """A receipt for sealed groups."""
        receipt = Receipt(
            accepted=b"".join(Envelope.parse(each).id for each in accepted),
            head=self.head.id,
            rate=None,
            refused=tuple(Refusal(why, Envelope.parse(each).id) for why, each in sorted(refused.items())),
            term=1,
            version=0,
        )
        await self.leader.publish(RECEIPTS, seal(receipt, by, RUN.id))
        await self.settled()

    async def settled(self):
        """Wait until what was sent is on disk, by threads that no test clock sees."""
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            async with self.buffer._turn:
                await self.journal.waiting()
        await trio.testing.wait_all_tasks_blocked()

    async def waiting(self):
        return [each.sealed for each in await self.journal.waiting()]


@asynccontextmanager
async def listening(folder):
    store = SimpleNamespace(
        blobs=BlobDir(folder, durable=False), follower=SimpleNamespace(heads=(), tip=None)
    )
    store.blobs.put(encode(roster(ANN, BOB)))
    async with (
        MemorySwarm() as swarm,
        swarm.join(HEIR) as network,
        swarm.join(TRAINER) as leader,
        swarm.join(ANN) as sampler,
        swarm.join(THIRD) as third,
        open_journal(None, RUN.id) as journal,
        trio.open_nursery() as nursery,
    ):
        buffer = StandbyBuffer(RUN, network, store, journal, ROOM)
        nursery.start_soon(buffer.follow)
        await trio.testing.wait_all_tasks_blocked()
        yield Listening(leader, sampler, journal, store, buffer, third)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("receipt_first", [False, True])
async def test_what_the_leader_has_accepted_waits_here_too_whichever_is_heard_first(tmp_path, receipt_first):
    async with listening(tmp_path) as heir:
        taken, other = heir.group(0), heir.group(1)
        if receipt_first:
            await heir.answer(taken)
        await heir.gossip(taken, other)
        if not receipt_first:
            assert await heir.waiting() == []
            await heir.answer(taken)
        assert await heir.waiting() == [taken]


async def test_only_who_leads_is_believed_in_what_was_accepted(tmp_path):
    async with listening(tmp_path) as heir:
        await heir.gossip(heir.group(0))
        await heir.answer(heir.group(0), by=THIRD)
        assert await heir.waiting() == []


async def test_a_forged_copy_takes_nobodys_place(tmp_path):
    async with listening(tmp_path) as heir:
        await heir.gossip(forged(heir.group(0)), sealed_group(RUN, heir.head.id, STRANGER, 0))
        await heir.answer(heir.group(1))
        await heir.gossip(forged(heir.group(1)))
        await heir.gossip(heir.group(0), heir.group(1))
        await heir.answer(heir.group(0))
        assert await heir.waiting() == [heir.group(1), heir.group(0)]


async def test_what_is_condemned_after_it_was_accepted_waits_no_longer(tmp_path):
    async with listening(tmp_path) as heir:
        bad = heir.group(0)
        await heir.gossip(bad, heir.group(1))
        await heir.answer(bad, heir.group(1))
        await heir.answer(condemned=bad)
        assert await heir.waiting() == [heir.group(1)]
        assert (await heir.journal.states())[Envelope.parse(bad).id] == "condemned"


async def test_what_is_too_stale_makes_room(tmp_path):
    async with listening(tmp_path) as heir:
        old = [heir.group(slot) for slot in range(ROOM)]
        for each in (*old, heir.group(ROOM)):
            await heir.gossip(each)
            await heir.answer(each)
        assert await heir.waiting() == old, "what was let in is not pushed out"
        for _ in range(2):
            heir.publish()
        new = heir.group(0)
        await heir.gossip(new)
        await heir.answer(new)
        assert await heir.waiting() == [new]
        assert set((await heir.journal.states()).values()) == {"stale", "waiting"}


async def test_whoever_is_heard_most_gives_way_first(tmp_path):
    async with listening(tmp_path) as heir:
        one = heir.group(0, BOB)
        await heir.gossip(one)
        for slot in range(3 * ROOM):
            await heir.gossip(heir.group(slot))
        assert len(heir.buffer._unconfirmed) == ROOM
        assert heir.buffer.bytes_of(Envelope.parse(one).id) == one
        assert heir.buffer.bytes_of(Envelope.parse(one).id) is None


@pytest.mark.parametrize("holder", [TRAINER, THIRD], ids=["leader", "another"])
async def test_a_group_too_large_for_gossip_is_fetched_and_waits_here_too(tmp_path, autojump_clock, holder):  # noqa: ARG001 - it jumps
    """Samplers send the leader a reference; its inventory is all that a standby hears of."""
    async with listening(tmp_path) as heir:
        sealed = heir.group(0)
        taken = TakenGroups(RUN)
        taken.add(Envelope.parse(sealed).id, sealed)
        desk = heir.leader if holder is TRAINER else heir.third
        with taken.serve(desk):
            inventory = Inventory(groups=Envelope.parse(sealed).id, head=heir.head.id, number=1, term=1)
            for by, here in ((THIRD, []), (TRAINER, [sealed])):
                await heir.leader.publish(INVENTORIES, seal(inventory, by, RUN.id))
                await heir.answer(sealed)
                await trio.sleep(20)
                await heir.settled()
                assert await heir.waiting() == here, "by the leader's word alone"
