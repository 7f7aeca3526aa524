"""Delivery of groups: each arrives despite lost gossip and restarts, and none is sent for ever."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import dataclasses
import random
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import Taker, deliver, serve_deliveries
from echo_node.net.outbox.outbox import LONGEST, open_outbox
from echo_node.rollouts import group_refs
from echo_node.rollouts.group_refs import FETCH_SECONDS, GroupRefFetcher, is_reference, refer_to
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import read_model
from echo_node.sampler.delivery import GroupDelivery
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.seeding import BlobDirRegistry
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import (
    Envelope,
    GroupReference,
    Receipt,
    Refusal,
    TermGrant,
    TermVote,
    blob_id,
    open_sealed,
    read_batch,
    seal,
    topics,
    write_batch,
)
from protocol.election import cast
from tests.crafting import SAMPLERS, TRAINER, Chain, open_run, sealed_group
from tests.records import sealed_record

RUN = open_run("async", staleness=2)
GROUPS, RECEIPTS = (topics.topic(RUN.id, cargo) for cargo in (topics.GROUPS, topics.RECEIPTS))
ANN = SAMPLERS[0]
LAYOUT = layout_of(read_model(embedded.folder()))


def receipt(head, *accepted: bytes, by=TRAINER, term: int | None = None, **refused: bytes) -> bytes:
    told = Receipt(
        accepted=b"".join(accepted),
        head=head.id,
        rate=None,
        refused=tuple(Refusal(reason, refused[reason]) for reason in sorted(refused)),
        term=term or head.message.term,
        version=head.message.version,
    )
    return seal(told, by, RUN.id)


class Leader:
    """A trainer that takes what reaches it, and answers as it is told to."""

    def __init__(self, network) -> None:
        self.network = network
        self.strangers: set[bytes] = set()
        self._fetching = GroupRefFetcher(network, RUN.id)
        self.gossiped: set[bytes] = set()
        self.delivered: list[bytes] = []
        self.answers = True
        self.refuses: str | None = None
        self._chain = Chain(RUN)
        self.publish()

    def publish(self, **told):
        """The next head."""
        self.head = self._chain.next(ANN, **told)
        return self.head

    async def listen(self, task_status):
        async with self.network.subscribe(GROUPS, lambda _: ACCEPT) as inbox:
            task_status.started()
            async for message in inbox:
                self.gossiped |= {each.id for each in read_batch(message.data) if not is_reference(each)}

    async def take(self, message):
        batch = read_batch(message.data)
        is_accepted = message.sender not in self.strangers
        groups = await self._fetching.groups_of(batch, message.sender, is_accepted=is_accepted)
        ids = [envelope.id for envelope in groups]
        self.delivered += ids
        if not self.answers:
            return b""
        if self.refuses:
            return receipt(self.head, **{self.refuses: b"".join(ids)})
        return receipt(self.head, *ids)


class Sampler:
    """A post office with a chain that hears heads, on a network whose leader may be deaf."""

    def __init__(self, swarm, folder, *heads) -> None:
        self.swarm = swarm
        self._path = folder / "outbox.sqlite"
        self._heads = list(heads)
        self.longest = LONGEST

    @asynccontextmanager
    async def life(self):
        with WeightsStore.temporary(RUN.rules, LAYOUT) as store:
            async with (
                self.swarm.join(ANN) as network,
                open_outbox(self._path) as self.outbox,
                trio.open_nursery() as nursery,
            ):
                self.network, self.store, self.chain = network, store, ChainFollower(network, store)
                for head in self._heads:
                    await self.chain.take_head(head.sealed)
                self.post = GroupDelivery(
                    RUN.id,
                    network,
                    ANN,
                    self.outbox,
                    self.chain,
                    store.blobs,
                    staleness=RUN.manifest.sync.staleness,
                    longest=self.longest,
                    luck=random.Random(0),
                )
                await self.post.start()
                nursery.start_soon(self.post.run)
                with BlobServer(network, BlobDirRegistry(store.blobs)).serve():
                    yield self
                nursery.cancel_scope.cancel()

    async def hear(self, head):
        self._heads.append(head)
        await self.chain.take_head(head.sealed)

    async def settled(self, holds) -> None:
        with trio.fail_after(3600):  # of a clock that jumps
            while not holds():  # noqa: ASYNC110 - an outbox has no event for this
                await trio.sleep(0.1)


@asynccontextmanager
async def meeting(folder, weather=None):
    """A sampler that is not there yet, and a leader that is."""
    async with (
        MemorySwarm(**(weather or {})) as swarm,
        swarm.join(TRAINER) as network,
        trio.open_nursery() as nursery,
    ):
        leader = Leader(network)
        await nursery.start(leader.listen)
        with serve_deliveries(network, {GROUPS: Taker(lambda _: ACCEPT, leader.take)}):
            yield Sampler(swarm, folder, leader.head), leader
        nursery.cancel_scope.cancel()


def records(head, *slots: int) -> list[RolloutRecord]:
    return [sealed_record(sealed, head.message.step) for sealed in groups(head, *slots)]


def groups(head, *slots: int) -> list[bytes]:
    return [sealed_group(RUN, head.id, ANN, slot) for slot in slots]


async def test_groups_go_by_gossip_and_a_receipt_ends_their_wait(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        ids = await ann.post.put(records(leader.head, 0, 1, 2))
        await ann.settled(lambda: leader.gossiped == set(ids))
        assert ann.outbox.pending == 3
        await ann.post.settle(open_sealed(receipt(leader.head, *ids[:2], stale=ids[2]), Receipt, RUN.id))
        assert (ann.outbox.pending, ann.outbox.kept) == (0, 2)
        assert [refused.reason for refused in await ann.outbox.refusals()] == ["stale"]


async def test_what_gossip_loses_is_delivered_by_hand(autojump_clock, tmp_path):
    async with meeting(tmp_path, {"loss": 1.0}) as (sampler, leader), sampler.life() as ann:
        ids = await ann.post.put(records(leader.head, 0, 1, 2))
        await ann.settled(lambda: not ann.outbox.pending)
        assert not leader.gossiped
        assert sorted(leader.delivered) == sorted(ids), "each once: the answer is a receipt"


async def test_what_is_refused_for_now_is_sent_again(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        leader.refuses = "full"
        (only,) = await ann.post.put(records(leader.head, 0))
        await ann.settled(lambda: len(leader.delivered) >= 3)
        assert ann.outbox.is_pending(only)
        leader.refuses = None
        await ann.settled(lambda: not ann.outbox.pending)
        assert set(leader.delivered) == {only}


async def test_what_is_refused_for_good_is_not_sent_again(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        leader.refuses = "wrong-prompt"
        (only,) = await ann.post.put(records(leader.head, 0))
        await ann.settled(lambda: not ann.outbox.pending)
        await trio.sleep(600)
        assert leader.delivered == [only]
        assert ann.outbox.kept == 0


async def test_a_receipt_of_somebody_else_or_of_an_older_term_settles_nothing(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        leader.answers = False
        first = leader.head
        (only,) = await ann.post.put(records(first, 0))
        await ann.post.settle(open_sealed(receipt(first, only, by=SAMPLERS[1]), Receipt, RUN.id))
        assert ann.outbox.is_pending(only)
        await _begin_term(ann, leader)
        await ann.post.settle(open_sealed(receipt(first, only, term=1), Receipt, RUN.id))
        assert ann.outbox.is_pending(only)
        await ann.post.settle(open_sealed(receipt(leader.head, only), Receipt, RUN.id))
        assert not ann.outbox.is_pending(only)


async def test_a_new_leader_gets_what_the_old_one_had_acknowledged(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        ids = await ann.post.put(records(leader.head, 0, 1))
        await ann.settled(lambda: not ann.outbox.pending)
        leader.delivered.clear()
        await _begin_term(ann, leader)
        await ann.settled(lambda: set(leader.delivered) == set(ids))
        await ann.settled(lambda: not ann.outbox.pending)


async def _begin_term(ann, leader):
    """Term 2, from the newest head, led by the same key, which may remember nothing."""
    vote = TermVote(base=leader.head.id, leader=TRAINER.public, term=2)
    ann.store.keep_grant(TermGrant((cast(vote, TRAINER, RUN.id),), vote))
    await ann.hear(leader.publish(term=2))


async def test_what_has_grown_too_stale_is_neither_sent_nor_kept(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        first = leader.head
        ids = await ann.post.put(records(first, 0))
        await ann.settled(lambda: not ann.outbox.pending)
        leader.answers = False
        ids += await ann.post.put(records(first, 1))
        for _ in range(2):
            await ann.hear(leader.publish())
        await trio.sleep(1)
        assert (ann.outbox.pending, ann.outbox.kept) == (1, 1), "two steps old: still within the bound"
        await ann.hear(leader.publish())
        await ann.settled(lambda: not ann.outbox.pending and not ann.outbox.kept)
        assert [(each.id, each.reason) for each in await ann.outbox.refusals()] == [(ids[1], "stale")]
        leader.delivered.clear()
        await trio.sleep(600)
        assert not leader.delivered


async def test_after_a_restart_everything_fresh_is_sent_again_and_slots_go_on(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader):
        async with sampler.life() as ann:
            ids = await ann.post.put(records(leader.head, 0, 1))
            await ann.settled(lambda: not ann.outbox.pending)
            leader.answers = False
            ids += await ann.post.put(records(leader.head, 2))
        leader.answers = True
        leader.delivered.clear()
        async with sampler.life() as ann:
            assert ann.post.next_slot(leader.head.id) == 3
            await ann.settled(lambda: not ann.outbox.pending)
            assert set(leader.delivered) == set(ids), "who led before is not known any more"
            await ann.hear(leader.publish())
            assert ann.post.next_slot(leader.head.id) == 0


async def test_a_leader_that_is_cut_off_gets_everything_when_it_is_back(autojump_clock, tmp_path):
    weather = {"loss": 0.3, "delay": (0.0, 0.5), "duplicate": 0.2, "reorder": 0.2}
    async with meeting(tmp_path, weather) as (sampler, leader), sampler.life() as ann:
        sampler.swarm.partition([ANN.public])
        ids = [each for slot in range(20) for each in await ann.post.put(records(leader.head, slot))]
        await trio.sleep(600)
        assert ann.outbox.pending == 20
        sampler.swarm.heal()
        await ann.settled(lambda: not ann.outbox.pending)
        assert set(leader.delivered) == set(ids)


async def test_a_group_that_is_too_long_is_fetched_by_who_is_handed_a_reference(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader):
        sampler.longest = 350
        async with sampler.life() as ann:
            sealed = groups(leader.head, 0, 1)
            assert len(sealed[0]) > sampler.longest
            ids = await ann.post.put([sealed_record(each) for each in sealed])
            blobs = ann.store.blobs
            assert len(list(blobs.all())) == 2
            await ann.settled(lambda: not ann.outbox.pending)
            assert sorted(leader.delivered) == sorted(ids), "the groups themselves, by their own names"
            assert not leader.gossiped, "there is no group in what was gossiped"
            assert ann.post.next_slot(leader.head.id) == 2
            assert len(list(blobs.all())) == 2, "a new leader may want them"
            for _ in range(3):
                await ann.hear(leader.publish())
            await ann.settled(lambda: not list(blobs.folder.iterdir()))


async def test_a_reference_is_taken_from_nobody_else_and_for_no_other_group(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        honest, other = map(sealed_record, groups(leader.head, 0, 1))
        ann.store.blobs.put(other.sealed)
        lying = dataclasses.replace(
            open_sealed(refer_to(honest, ANN, RUN.id), GroupReference, RUN.id).message,
            blob=blob_id(other.sealed),
        )
        stolen = refer_to(honest, SAMPLERS[1], RUN.id)
        for reference, says in ((seal(lying, ANN, RUN.id), "another group"), (stolen, "somebody else's")):
            with pytest.raises(PeerError, match=says):
                await deliver(ann.network, TRAINER.public, GROUPS, write_batch([reference]), deadline=20)
        assert not leader.delivered


async def test_a_stranger_has_nothing_fetched(autojump_clock, tmp_path):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        (sealed,) = groups(leader.head, 0)
        ann.store.blobs.put(sealed)
        reference = refer_to(sealed_record(sealed), ANN, RUN.id)
        leader.strangers = {ANN.public}
        with pytest.raises(PeerError, match="samplers of the run only"):
            await deliver(ann.network, TRAINER.public, GROUPS, write_batch([reference]), deadline=20)
        assert not leader.delivered
        leader.strangers.clear()
        await deliver(ann.network, TRAINER.public, GROUPS, write_batch([reference]), deadline=20)
        assert len(leader.delivered) == 1


async def test_a_sampler_whose_blobs_never_come_is_served_once_at_a_time_and_not_for_long(
    autojump_clock, tmp_path
):
    """It holds one place, and others' deliveries go through meanwhile."""
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        absent = [sealed_record(sealed) for sealed in groups(leader.head, *range(4))]
        batch = write_batch([refer_to(group, ANN, RUN.id) for group in absent])
        answers: list[str] = []

        async def send(deadline):
            with pytest.raises(PeerError) as refusal:
                await deliver(ann.network, TRAINER.public, GROUPS, batch, deadline=deadline)
            answers.append(str(refusal.value))

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(send, 60)
            async with sampler.swarm.join(SAMPLERS[1]) as other:
                (inline,) = [sealed_group(RUN, leader.head.id, SAMPLERS[1], 0)]
                await deliver(other, TRAINER.public, GROUPS, write_batch([inline]), deadline=1)
        assert trio.current_time() - started < 2 * FETCH_SECONDS, "one deadline for all of a delivery"
        assert sum("one delivery" in answer for answer in answers) == 2
        assert len(leader.delivered) == 1


async def test_a_delivery_has_each_group_fetched_once_and_no_more_than_fits(
    autojump_clock, tmp_path, monkeypatch
):
    async with meeting(tmp_path) as (sampler, leader), sampler.life() as ann:
        sealed = groups(leader.head, *range(4))
        for each in sealed:
            ann.store.blobs.put(each)
        references = [refer_to(sealed_record(each), ANN, RUN.id) for each in sealed]
        monkeypatch.setattr(group_refs, "TOGETHER", 2 * len(sealed[0]) + 10)
        batch = write_batch([references[0]] * 2 + references[1:])
        await deliver(ann.network, TRAINER.public, GROUPS, batch, deadline=20)
        assert len(leader.delivered) == len(set(leader.delivered)) < 4, (
            "the rest goes without a receipt, and comes again"
        )
        assert Envelope.parse(sealed[0]).id in leader.delivered
