"""Standby: the leader ends, another goes on from its checkpoint and weights."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
import trio

from echo_node.election.elector import VoteLog
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.engine.base import TensorBytes
from echo_node.net.memory import MemorySwarm
from echo_node.net.rate_limit import Throttle
from echo_node.runs.run import Run, read_model
from echo_node.runs.spec import RunSpec, TermsTable, new_run
from echo_node.trainer.checkpoint import Checkpoint, newest_checkpoint, write_checkpoint
from echo_node.trainer.journal import Batch, open_journal
from echo_node.trainer.provenance import provenance_record_of
from echo_node.trainer.recovery import accounted_since
from echo_node.trainer.replicated_checkpoints import ReplicatedCheckpoints
from echo_node.trainer.standby import Standby
from echo_node.weights.provenance_record import provenance_ext
from echo_node.weights.publisher import Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import Roster, TrajectoryGroup, derive, open_sealed, topics
from protocol.manifest import Terms
from tests.crafting import SAMPLERS, TRAINER, changed_run, identity, open_run, sealed_group
from tests.net.conftest import libp2p, memory
from tests.records import record_of

HEIR, JUDGE = identity("heir"), identity("judge")
MODEL = read_model(open_run().folder)
LAYOUT = layout_of(MODEL)


def run_with(*electors, beat=200, lease=2000):
    """A run with two trainers and a verifier."""
    return changed_run(
        open_run("async", staleness=2, group_size=4),
        trainers=(TRAINER.public, HEIR.public),
        verifiers=(JUDGE.public,),
        terms=Terms(tuple(sorted(each.public for each in electors)), beat, lease),
    )


RUN = run_with(TRAINER, HEIR, JUDGE)


def opened_store(folder, run=RUN):
    folder.mkdir(exist_ok=True)
    return WeightsStore.open(folder / "weights", run.rules, LAYOUT, durable=False)


@asynccontextmanager
async def judge(join, folder, run=RUN):
    """An elector that follows the chain."""
    with opened_store(folder, run) as store:
        async with join(JUDGE) as network:
            puller = Puller(network, store)
            vote_log = VoteLog(folder / "votes", JUDGE, run.id, durable=False)
            watch = LeaderMonitor(
                network, puller.chain, run.manifest.terms, votes=vote_log, held=lambda: store.tip
            )
            async with puller.work(), watch.work():
                yield puller


def somewhat_changed(version: int):
    """The model with some bits turned over."""
    state = dict(MODEL)
    name = sorted(state)[version % len(state)]
    tensor = state[name]
    data = bytearray(tensor.data)
    data[0] ^= version & 0xFF
    state[name] = TensorBytes(tensor.dtype, tensor.shape, bytes(data))
    return state


class Leading:
    """A leader that does not train: it publishes a version on demand."""

    def __init__(self, network, store, who, folder):
        self.network, self.store, self.folder = network, store, folder
        self.publisher = Publisher(
            store, who, luck=lambda: derive("luck", who.public, len(store.follower.heads).to_bytes(8))
        )
        self.began = trio.Event()
        self.heads = []
        self.forgets_weights = False
        """Whether what it publishes cannot be had from it."""
        self._puller = Puller(network, store)

    async def lead(self):
        async with self._puller.seeder.serve():
            if self.store.follower.tip is None:
                await self.publish(MODEL)
            self.began.set()
            await trio.sleep_forever()

    async def publish(self, state, groups=(), account=None):
        tip = self.publisher.tip
        step = tip.message.step + 1 if tip else 0
        ext = {} if account is None else provenance_ext(self.store.blobs.put(account))
        made = await trio.to_thread.run_sync(
            lambda: self.publisher.publish(state, step=step, roster=Roster(()), groups=groups, ext=ext)
        )
        self.heads.append(made.head)
        for route in made.head.message.routes if self.forgets_weights else ():
            self.store.blobs.path(route.table).unlink()
        await self.network.publish(
            topics.topic(self.store.follower.rules.run, topics.HEADS), made.head.sealed
        )
        return made.head

    def checkpoint(self, number):
        """Something that looks like one, of the newest version."""
        tip = self.publisher.tip.message
        notes = {"head_version": str(tip.version), "batch": str(number)}
        write_checkpoint(
            self.folder / "checkpoints", Checkpoint(tip.step, {"x": torch.full((9,), 1.0 * number)}, notes)
        )


@asynccontextmanager
async def trainer(join, who, folder, run=RUN, **bounds):
    """A trainer that takes its turns, for as long as the block lasts."""
    with opened_store(folder, run) as store:
        async with (
            open_journal(folder / "journal.sqlite", run.id) as journal,
            join(who) as network,
            trio.open_nursery() as nursery,
        ):
            standby = Standby(run, network, who, store, folder, journal, **bounds)
            leading = Leading(network, store, who, folder)
            nursery.start_soon(standby.take_turns, leading.lead)
            yield standby, leading
            nursery.cancel_scope.cancel()


async def until(condition, seconds=60):
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in threads and on disk
            await trio.sleep(0.02)


class Counted(Throttle):
    """A limit that nobody reaches, and what was asked of it."""

    def __init__(self):
        super().__init__(1e12)
        self.bytes = 0

    async def take(self, count):
        self.bytes += count
        await super().take(count)


async def test_what_a_trainer_fetches_while_it_stands_by_keeps_to_what_is_allowed(tmp_path):
    downlink = Counted()
    async with (
        memory() as join,
        trainer(join, TRAINER, tmp_path / "trainer") as (_, before),
        trainer(join, HEIR, tmp_path / "heir", downlink=downlink) as (heir, after),
    ):
        await before.began.wait()
        last = await before.publish(somewhat_changed(1))
        before.checkpoint(1)
        await until(lambda: heir.checkpoint_fetcher.kept and after.store.tip == last)
    assert downlink.bytes >= heir.checkpoint_fetcher.kept.size + after.store.flat.size


@pytest.mark.parametrize(
    ("medium", "lease"),
    [(memory, 2_000), pytest.param(libp2p, 12_000, marks=pytest.mark.slow)],
    ids=["memory", "libp2p"],
)
async def test_the_heir_goes_on_from_the_newest_weights_and_checkpoint(tmp_path, medium, lease):
    run = run_with(TRAINER, HEIR, JUDGE, lease=lease)
    async with (
        medium() as join,
        judge(join, tmp_path / "judge", run) as watcher,
        trainer(join, HEIR, tmp_path / "heir", run) as (heir, after),
    ):
        async with trainer(join, TRAINER, tmp_path / "trainer", run) as (_, before):
            await before.began.wait()
            for version in range(1, 4):
                last = await before.publish(somewhat_changed(version))
                before.checkpoint(version)
            await until(lambda: heir.checkpoint_fetcher.kept and heir.checkpoint_fetcher.kept.step == 3)
            await until(lambda: after.store.tip == last and watcher.chain.tip == last)
            assert not after.began.is_set()
        with trio.fail_after(60):
            await after.began.wait()
        assert after.store.follower.term == 2
        assert after.store.follower.tip == last
        kept = newest_checkpoint(tmp_path / "heir" / "checkpoints")
        assert (kept.step, kept.notes["batch"]) == (3, "3")
        first = await after.publish(somewhat_changed(9))
        assert (first.message.term, first.message.version) == (2, 4)
        assert first.message.anchor is not None
        await until(lambda: watcher.chain.tip == first)
        async with trainer(join, TRAINER, tmp_path / "trainer", run) as (_, back):
            await until(lambda: back.store.tip == first)
            assert not back.began.is_set(), "it follows, and does not lead"
            assert back.store.follower == after.store.follower


async def test_an_account_is_believed_only_if_it_is_what_the_head_commits_to(tmp_path):
    async with (
        MemorySwarm() as swarm,
        trainer(swarm.join, HEIR, tmp_path / "heir") as (heir, after),
        trainer(swarm.join, TRAINER, tmp_path / "trainer") as (_, before),
    ):
        await before.began.wait()
        before.forgets_weights = True  # nobody waits for these
        under, heads = before.heads[0], []
        for version in (1, 2):
            sealed = [sealed_group(RUN, under.id, SAMPLERS[0], 2 * version + n) for n in range(2)]
            groups = [open_sealed(each, TrajectoryGroup, RUN.id) for each in sealed]
            used = [record_of(each, 0, rewards=(1.0,)) for each in groups]
            batch = used if version == 1 else [used[0], replace(used[0], id=used[1].id)]
            account = provenance_record_of([Batch(version, version - 1, version, tuple(batch))])
            ids = [each.id for each in used]
            heads.append(await before.publish(somewhat_changed(version), ids, account))
        await until(lambda: {head.id for head in heads} <= heir._provenance._done)
        journal = heir._journal
        assert [batch.version for batch in await journal.batches()] == [1]
        assert await accounted_since(journal, after.store.follower.heads, bound=2) == 2


async def test_a_head_whose_weights_went_down_with_the_leader_stops_nobody(tmp_path):
    async with (
        MemorySwarm() as swarm,
        judge(swarm.join, tmp_path / "judge") as watcher,
        trainer(swarm.join, HEIR, tmp_path / "heir") as (_, after),
    ):
        async with trainer(swarm.join, TRAINER, tmp_path / "trainer") as (_, before):
            await before.began.wait()
            common = await before.publish(somewhat_changed(1))
            await until(lambda: after.store.tip == common and watcher.chain.tip == common)
            await watcher.pull()
            before.forgets_weights = True
            lost = await before.publish(somewhat_changed(2))
            await until(lambda: watcher.chain.tip == lost and after.store.follower.tip == lost)
        with trio.fail_after(60):
            await after.began.wait()
        assert after.store.follower.tip == common
        new = await after.publish(somewhat_changed(3))
        await until(lambda: watcher.chain.tip == new)


async def test_a_leader_that_was_cut_off_gives_up_its_own_branch(tmp_path):
    async with (
        MemorySwarm() as swarm,
        judge(swarm.join, tmp_path / "judge") as watcher,
        trainer(swarm.join, HEIR, tmp_path / "heir") as (_, after),
        trainer(swarm.join, TRAINER, tmp_path / "trainer") as (_, before),
    ):
        await before.began.wait()
        common = await before.publish(somewhat_changed(1))
        await until(lambda: after.store.tip == common and watcher.chain.tip == common)
        swarm.partition([TRAINER.public])
        lost = await before.publish(somewhat_changed(2))
        before.checkpoint(2)
        with trio.fail_after(60):
            await after.began.wait()
        new = await after.publish(somewhat_changed(3))
        assert (new.message.version, lost.message.version) == (2, 2)
        swarm.heal()
        await until(lambda: before.store.tip == new)
        assert before.store.follower == after.store.follower
        assert before.store.follower.leader == HEIR.public
        assert before.store.find(lost.id) == lost


async def test_too_few_electors_wait_for_an_operator(tmp_path):
    run = run_with(HEIR, JUDGE, beat=100, lease=300)
    async with (
        MemorySwarm() as swarm,
        judge(swarm.join, tmp_path / "judge", run),
        trainer(swarm.join, HEIR, tmp_path / "heir", run) as (heir, after),
    ):
        async with trainer(swarm.join, TRAINER, tmp_path / "trainer", run) as (_, before):
            await before.began.wait()
            await until(lambda: after.store.tip == before.heads[0])
        await heir.lease.wait_until_over()
        with trio.move_on_after(3 * 0.3) as patience:
            await after.began.wait()
        assert patience.cancelled_caught
        assert after.store.follower.term == 1
        heir.promote()
        with trio.fail_after(60):
            await after.began.wait()
        assert after.store.follower.leader == HEIR.public


async def test_the_second_of_two_trainers_alone_leads_when_the_first_is_gone_and_an_operator_says_so(
    tmp_path,
):
    """As a run's file makes such a run, which says nothing of who votes."""
    spec = RunSpec(
        name="two",
        trainers=[TRAINER.peer_id, HEIR.peer_id],
        terms=TermsTable(heartbeat_ms=100, lease_ms=300),
    )
    run = Run.open(new_run(spec, TRAINER).sealed, open_run().folder, jailed=False)
    async with (
        MemorySwarm() as swarm,
        trainer(swarm.join, HEIR, tmp_path / "heir", run) as (heir, after),
    ):
        async with trainer(swarm.join, TRAINER, tmp_path / "trainer", run) as (_, before):
            await before.began.wait()
            await until(lambda: after.store.tip == before.heads[0])
        await heir.lease.wait_until_over()
        with trio.move_on_after(3 * 0.3):
            await after.began.wait()
        assert not after.began.is_set()
        heir.promote()
        with trio.fail_after(60):
            await after.began.wait()
        assert after.store.follower.leader == HEIR.public
        async with trainer(swarm.join, TRAINER, tmp_path / "trainer", run) as (_, back):
            await until(lambda: back.store.follower.leader == HEIR.public)
            assert not back.began.is_set()


def test_checkpoints_of_a_branch_that_was_left_are_forgotten(tmp_path):
    folder = tmp_path / "checkpoints"
    for step, version in ((3, 3), (5, 6)):
        write_checkpoint(folder, Checkpoint(step, {"x": torch.zeros(1)}, {"head_version": str(version)}))
    ReplicatedCheckpoints(folder).remove_after(6)
    assert newest_checkpoint(folder).step == 5
    ReplicatedCheckpoints(folder).remove_after(5)
    assert newest_checkpoint(folder).step == 3
