"""Failover with real trainers: the same bits, and each group used once."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio

from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.runs.algorithm import training_settings
from echo_node.telemetry.metrics import Records
from echo_node.trainer.journal import open_journal
from echo_node.trainer.loop import TrainerLoop
from echo_node.trainer.standby import Standby
from echo_node.trainer.step import TrainStep
from echo_node.weights.publisher import Publisher
from echo_node.weights.store_metadata import write_metadata
from protocol import Envelope, Join, Receipt, derive, merkle_root, open_sealed, seal, topics, write_batch
from protocol.digest import ZERO
from tests.crafting import ENGINE, SAMPLERS, TRAINER, sealed_group
from tests.trainer.crash_points import Recording
from tests.trainer.test_provenance import ask
from tests.trainer.test_standby import HEIR, JUDGE, LAYOUT, RUN, judge, opened_store, until
from tests.trainer.test_verdict_policy import verdict

ANN, BOB = SAMPLERS[:2]
GROUPS = topics.topic(RUN.id, topics.GROUPS)


class Steady(Recording):
    """Fills the slots of the newest head and shows them to `show`; stops before a batch."""

    def __init__(self, store, stop_before, show):
        super().__init__(store)
        self.stop_before = stop_before
        self.stopped = trio.Event()
        self.show = show

    async def next_batch(self, request):
        if request.number >= self.stop_before:
            await self.heads.wait_read()
            self.stopped.set()
            await trio.sleep_forever()
        batch = await super().next_batch(replace(request, number=0))
        await self.show(self.batches[-1])
        return batch


class Training:
    """A real trainer, started whenever its standby leads.

    Without a source it learns from gossip.
    """

    def __init__(self, network, store, who, folder, journal, checkpoint_every):
        self.network, self.store, self.who, self.folder = network, store, who, folder
        self.journal = journal
        self.checkpoint_every = checkpoint_every
        self.records = Records()
        self.loop = None
        self.source = None

    async def lead(self):
        step = await trio.to_thread.run_sync(
            lambda: TrainStep(RUN.folder, training_settings(RUN.manifest).step, threads=1, device="cpu")
        )
        publisher = Publisher(
            self.store, self.who, luck=lambda: derive("luck", len(self.store.follower.heads).to_bytes(8))
        )
        if self.who is TRAINER:
            for sampler in (ANN, BOB):
                join = Join(agent="", engine=ENGINE, head=ZERO, name="")
                await self.journal.join(sampler.public, seal(join, sampler, RUN.id))
        self.loop = TrainerLoop(
            RUN,
            self.network,
            self.who,
            step=step,
            publisher=publisher,
            records=self.records,
            journal=self.journal,
            checkpoints=self.folder / "checkpoints",
            checkpoint_every=self.checkpoint_every,
            source=self.source,
        )
        if self.source is not None:
            self.source.judge = self.loop.groups.admission.judge
            self.source.heads = self.loop._heads
        await self.loop.work(100, first_samplers=2)


async def nobody_looks(_network, _sealed):
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def training(join, who, folder, checkpoint_every, stop_before=None, show=nobody_looks):
    with opened_store(folder) as store:
        async with (
            open_journal(folder / "journal.sqlite", RUN.id) as journal,
            join(who) as network,
            trio.open_nursery() as nursery,
        ):
            standby = Standby(RUN, network, who, store, folder, journal)
            real = Training(network, store, who, folder, journal, checkpoint_every)
            if stop_before is not None:
                real.source = Steady(store, stop_before, partial(show, network))
            nursery.start_soon(standby.take_turns, real.lead)
            yield standby, real
            nursery.cancel_scope.cancel()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("every", "shown", "learnt", "replayed", "adopted"),
    [(1, False, 4, 0, False), (3, True, 3, 1, False), (3, False, 3, 0, True)],
    ids=[
        "bit for bit from the newest checkpoint",
        "bit for bit from an older one and the groups that were overheard",
        "from an older one and the newest weights",
    ],
)
async def test_training_goes_on_where_the_leader_ended(
    tmp_path, monkeypatch, every, shown, learnt, replayed, adopted
):
    """`learnt` batches are in the checkpoint; the fourth is in the weights anyway."""
    monkeypatch.setattr("tests.trainer.crash_points.RUN", RUN)
    async with (
        MemorySwarm() as swarm,
        judge(swarm.join, tmp_path / "judge") as watcher,
        training(swarm.join, HEIR, tmp_path / "heir", every, stop_before=8) as (heir, after),
    ):

        async def show(leader, sealed):
            """To everybody, once the heir can know who may sample."""
            await until(lambda: after.store.tip is not None)
            await leader.publish(GROUPS, write_batch(sealed))
            ids = {Envelope.parse(each).id for each in sealed}
            await until(lambda: ids <= heir._group_buffer._unconfirmed.keys())

        looks = show if shown else nobody_looks
        async with training(swarm.join, TRAINER, tmp_path / "trainer", every, 5, looks) as (_, before):
            await until(before.source.stopped.is_set, 120)
            last = before.store.follower.tip
            await until(lambda: after.store.tip == last and watcher.chain.tip == last)
            await until(lambda: heir.checkpoint_fetcher.kept and heir.checkpoint_fetcher.kept.step == learnt)
            assert after.loop is None
        await until(after.source.stopped.is_set, 120)
        stood = after.loop.recovered
        assert (stood.number, stood.tip) == (4, last)
        assert stood.replayed == replayed
        assert stood.adopted is adopted, "whether its masters do not round to the bits that were published"
        new = [head for head in after.store.follower.heads if head.message.term == 2]
        assert [head.message.version for head in new] == [last.message.version + n for n in (1, 2, 3)]
        assert [head.message.step for head in new] == [last.message.step + n for n in (1, 2, 3)]
        assert new[0].message.anchor is not None
        assert [record.number for record in after.records.steps] == list(range(5 - replayed, 8))
        await until(lambda: watcher.chain.tip == new[-1])


def ids_of(*sealed):
    return sorted(Envelope.parse(each).id for each in sealed)


def trained_on(store, *sealed):
    """Versions that were trained on exactly these groups."""
    root = merkle_root(ids_of(*sealed))
    return [head for head in store.follower.heads if head.message.groups == root]


@pytest.mark.timeout(240)
async def test_what_waits_when_the_leader_ends_is_used_once_and_what_was_used_is_not_used_again(tmp_path):
    """Some waiting groups were overheard; others only the leader had.

    Samplers send all of them again.
    """
    for name in ("trainer", "heir"):
        (tmp_path / name).mkdir()
        write_metadata(tmp_path / name / "weights", RUN.sealed_manifest, LAYOUT)
    async with (
        MemorySwarm() as swarm,
        swarm.join(ANN) as sampler,
        judge(swarm.join, tmp_path / "judge") as watcher,
        training(swarm.join, HEIR, tmp_path / "heir", 100) as (_, after),
    ):

        async def deliver_to(leader, *sealed):
            answer = await deliver(sampler, leader.public, GROUPS, write_batch(sealed), deadline=60)
            assert sorted(open_sealed(answer, Receipt, RUN.id).message.accepted_ids()) == ids_of(*sealed)

        async with training(swarm.join, TRAINER, tmp_path / "trainer", 100) as (_, before):
            await until(lambda: before.store.follower.heads and after.store.tip)
            first = before.store.follower.heads[0].id
            used = [sealed_group(RUN, first, ANN, slot) for slot in range(4)]
            await deliver_to(TRAINER, *used)
            await until(lambda: trained_on(before.store, *used))
            overheard = [sealed_group(RUN, first, BOB, slot) for slot in range(2)]
            await sampler.publish(GROUPS, write_batch(overheard))
            waits = []
            with trio.fail_after(60):
                while ids_of(*waits) != ids_of(*overheard):
                    waits = [each.sealed for each in await after.journal.waiting()]
                    await trio.sleep(0.02)
            unheard = sealed_group(RUN, first, BOB, 2)
            await deliver_to(TRAINER, unheard)
            last = before.store.follower.tip
            await until(lambda: after.store.tip == last and watcher.chain.tip == last)
            assert after.loop is None
        await until(lambda: after.loop is not None and after.loop.recovered is not None)
        assert after.store.follower.leader == HEIR.public
        assert len(after.loop.groups.buffer) == 2
        await until(lambda: any(head.message.term == 2 for head in watcher.chain.follower.heads))
        await deliver_to(HEIR, *used, *overheard, unheard)
        assert len(after.loop.groups.buffer) == 3
        fourth = sealed_group(RUN, first, ANN, 4)
        await deliver_to(HEIR, fourth)
        await until(lambda: trained_on(after.store, *overheard, unheard, fourth))
        await deliver_to(HEIR, *used, *overheard, unheard, fourth)
        assert len(after.loop.groups.buffer) == 0
        (of_leader,) = trained_on(after.store, *used)
    asked = ask(of_leader.message.version, "--folder", tmp_path / "heir", "--json")
    assert asked.exit_code == 0
    rows = [json.loads(line) for line in asked.stdout.splitlines()]
    assert sorted(bytes.fromhex(row["group"]) for row in rows) == ids_of(*used)


@pytest.mark.timeout(240)
async def test_whom_verifiers_have_muted_under_the_leader_is_muted_under_its_heir(tmp_path):
    """They do not say it again: whom they have muted they pass over."""
    for name in ("trainer", "heir"):
        (tmp_path / name).mkdir()
        write_metadata(tmp_path / name / "weights", RUN.sealed_manifest, LAYOUT)
    async with (
        MemorySwarm() as swarm,
        swarm.join(ANN) as sampler,
        judge(swarm.join, tmp_path / "judge") as watcher,
        training(swarm.join, HEIR, tmp_path / "heir", 100) as (_, after),
    ):
        async with training(swarm.join, TRAINER, tmp_path / "trainer", 100) as (_, before):
            await until(lambda: before.store.follower.heads and after.store.tip)
            sealed = sealed_group(RUN, before.store.follower.heads[0].id, ANN, 0)
            await sampler.publish(GROUPS, write_batch([sealed]))
            sealed_verdict = verdict(RUN, *ids_of(sealed), JUDGE, "dishonest")
            await sampler.publish(topics.topic(RUN.id, topics.VERDICTS), write_batch([sealed_verdict.sealed]))
            await until(lambda: before.loop._policy.is_muted(ANN.public))
            with trio.fail_after(60):
                while not await after.journal.findings():  # noqa: ASYNC110 - files tell nobody
                    await trio.sleep(0.02)
            last = before.store.follower.tip
            await until(lambda: after.store.tip == last and watcher.chain.tip == last)
        await until(lambda: after.loop is not None and after.loop.recovered is not None)
        assert after.loop._policy.mutes().keys() == {ANN.public}
