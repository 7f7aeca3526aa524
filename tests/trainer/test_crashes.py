"""A live swarm whose trainer crashes: proven from receipts, heads and the journal."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import PeerError
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.node.context import NodeContext
from echo_node.rollouts.group_refs import is_group
from echo_node.runs.spec import VerificationTable
from echo_node.sampler.loop import SamplerLoop
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import read_records
from echo_node.trainer.journal import open_journal
from protocol import (
    Receipt,
    TrajectoryGroup,
    WeightsHead,
    derive,
    merkle_root,
    open_sealed,
    read_batch,
    topics,
)
from protocol.manifest import Sync, Verification
from tests.cheats import OwnLuck
from tests.crafting import SAMPLERS, TRAINER, changed_run, identity, open_run

BOUND = 2
RUN = open_run("async", staleness=BOUND, group_size=4)
ANN, BOB = SAMPLERS[:2]


def engine():
    return make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))


class Wrapped:
    """An engine with something else about it."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Slow(Wrapped):
    """An engine that returns completions one step later each time, up to four."""

    def __init__(self, inner, records):
        super().__init__(inner)
        self._records, self._calls = records, 0

    def generate(self, requests, *, stop=lambda: False, **more):
        self._calls += 1
        until = len(self._records.steps) + self._calls % 5
        drawn = list(self._inner.generate(list(requests), stop=stop, **more))
        while len(self._records.steps) < until and not stop():
            time.sleep(0.005)
        yield from drawn


class Spy:
    """Hears all that is said in a run."""

    def __init__(self, run):
        self.run, self.heads, self.groups = run.id, {}, {}
        self.accepted, self.refused = set(), {}

    async def listen(self, swarm, *, task_status=trio.TASK_STATUS_IGNORED):
        async with swarm.join(identity("spy")) as network, trio.open_nursery() as nursery:
            for cargo, note in (
                (topics.HEADS, self._head),
                (topics.GROUPS, self._groups),
                (topics.RECEIPTS, self._receipt),
            ):
                await nursery.start(self._hear, network, cargo, note)
            task_status.started()

    async def _hear(self, network, cargo, note, *, task_status):
        topic = topics.topic(self.run, cargo)
        async with network.subscribe(topic, lambda _: ACCEPT, capacity=100_000) as inbox:
            task_status.started()
            with suppress(PeerError):
                async for message in inbox:
                    note(message.data)

    def _head(self, data):
        head = open_sealed(data, WeightsHead, self.run)
        self.heads[head.id] = head

    def _groups(self, data):
        for envelope in filter(is_group, read_batch(data)):
            self.groups[envelope.id] = envelope.open(TrajectoryGroup, self.run)

    def _receipt(self, data):
        receipt = open_sealed(data, Receipt, self.run, signer=TRAINER.public).message
        self.accepted |= set(receipt.accepted_ids())
        self.refused |= dict(receipt.refused_ids())

    @property
    def chain(self):
        """One head for each version, each named by the next."""
        heads = sorted(self.heads.values(), key=lambda head: head.message.version)
        assert [head.message.version for head in heads] == list(range(len(heads)))
        assert all(after.message.previous == before.id for before, after in itertools.pairwise(heads))
        return heads


async def swarm_of(run, engines, work):
    """Samplers with these engines, and a trainer that `work` starts and ends as it likes."""
    spy = Spy(run)
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        await nursery.start(spy.listen, swarm)
        for sampler, chosen in zip(SAMPLERS, engines, strict=False):
            node = Node(run, sampler, swarm.join)
            nursery.start_soon(lambda node=node, chosen=chosen: node.sample(slots_per_call=2, engine=chosen))
        with trio.fail_after(110):
            await work(swarm)
        nursery.cancel_scope.cancel()
    return spy


async def one_life(run, swarm, folder, records, until, **options):
    """A trainer that ends in the middle of things, once it has recorded so many steps."""
    with trio.CancelScope() as life:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, records, until, life)
            await Node(run, TRAINER, swarm.join, folder=folder).train(10_000, records=records, **options)


async def _cancel_after(records, steps, life):
    while len(records.steps) < steps:  # noqa: ASYNC110 - records are plain data and have no event
        await trio.sleep(0.002)
    life.cancel()


def check_commitments(spy, records):
    """Each head commits to exactly the groups of its batches, and no group is in two."""
    by_version = {}
    for record in records:
        by_version.setdefault(record.version, []).extend(group.id for group in record.groups)
    for head in spy.chain:
        assert head.message.groups == merkle_root(sorted(by_version.get(head.message.version, [])))
    used = Counter(group for ids in by_version.values() for group in ids)
    assert used
    assert set(used.values()) == {1}, "nothing is used twice"
    return set(used)


def check_ages(spy, records, bound):
    steps = {head.id: head.message.step for head in spy.heads.values()}
    ages = [record.policy_step - steps[group.head] for record in records for group in record.groups]
    assert 0 <= min(ages) <= max(ages) <= bound, "nothing staler than the bound"
    return set(ages)


async def test_across_restarts_of_the_trainer_nothing_acknowledged_is_lost_used_twice_or_too_stale(tmp_path):
    async def work(swarm):
        for until in (3, 7, 8, 14):
            await one_life(RUN, swarm, tmp_path, Records(), until, first_samplers=2, checkpoint_every=4)

    spy = await swarm_of(RUN, [engine(), engine()], work)
    records = read_records(tmp_path / "records.sqlite")
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= 14
    async with open_journal(tmp_path / "journal.sqlite", RUN.id) as journal:
        states, batches = await journal.states(), await journal.batches()
    # The last batch may have been drawn, and its head published, before it was recorded.
    in_batches = {group.id for batch in batches for group in batch.groups}
    used = check_commitments(spy, records[: len(spy.chain)])
    assert used <= in_batches
    check_ages(spy, records, BOUND)
    tip = spy.chain[-1].message.step
    steps = {head.id: head.message.step for head in spy.heads.values()}
    for group in spy.accepted:
        state = states.get(group, "pruned")
        if state in {"stale", "pruned"}:  # let go for its age, which is no loss
            assert tip - steps[spy.groups[group].message.heads[0]] > BOUND
        else:
            assert state in {"drawn", "waiting"}
    assert in_batches <= spy.accepted | spy.groups.keys()
    assert {states[group] for group in spy.accepted if group in states} >= {"drawn"}


@asynccontextmanager
async def stubborn(_loop, _head):
    """In place of the watch for stale groups: whatever was begun is drawn and sent."""
    yield trio.CancelScope()


@pytest.mark.parametrize("gives_up", [False, True], ids=["stubborn", "gives up"])
async def test_with_a_slow_sampler_nothing_staler_than_the_bound_is_trained_on(monkeypatch, gives_up):
    records = Records()
    if not gives_up:
        monkeypatch.setattr(SamplerLoop, "_until_stale", stubborn)

    async def work(swarm):
        await Node(RUN, TRAINER, swarm.join).train(24, records=records, first_samplers=2)

    spy = await swarm_of(RUN, [engine(), Slow(engine(), records)], work)
    check_commitments(spy, records.steps)
    check_ages(spy, records.steps, BOUND)
    if not gives_up:
        assert records.steps[-1].dropped.get("stale", 0) > 0, "some came too late, and were refused"
    assert {group.sampler for record in records.steps for group in record.groups} == {
        ANN.public,
        BOB.public,
    }, "and some in time: a slow sampler is not shut out"


async def test_a_run_begins_sequential_and_goes_over_to_asynchronous():
    run = changed_run(RUN, sync=Sync(async_from=3, head_every=1, in_flight=False, staleness=BOUND))
    records = Records()

    async def work(swarm):
        await Node(run, TRAINER, swarm.join).train(9, records=records, first_samplers=2)

    spy = await swarm_of(run, [engine(), engine()], work)
    used = check_commitments(spy, records.steps)
    check_ages(spy, records.steps, BOUND)
    heads = spy.chain
    for record in records.steps[:3]:
        assert {group.head for group in record.groups} == {heads[record.version - 1].id}, "of its own version"
    versions = {head.id: head.message.version for head in heads}
    pushed = {
        group for group, group_message in spy.groups.items() if versions[group_message.message.heads[0]] >= 3
    }
    assert spy.groups.keys() == pushed, "nobody pushes before"
    later = {group.id for record in records.steps[3:] for group in record.groups}
    assert later <= pushed
    assert later < used


async def test_a_head_every_few_steps_commits_to_all_their_batches_and_staleness_counts_steps():
    run = changed_run(RUN, sync=Sync(async_from=0, head_every=3, in_flight=False, staleness=BOUND))
    records = Records()

    async def work(swarm):
        await Node(run, TRAINER, swarm.join).train(10, records=records, first_samplers=2)

    spy = await swarm_of(run, [engine(), engine()], work)
    check_commitments(spy, records.steps)
    assert max(check_ages(spy, records.steps, BOUND)) == BOUND, (
        "a batch of the head's own step, and two after it"
    )
    moved = [head for head in spy.chain if head.message.groups != merkle_root([])]
    assert [head.message.step for head in moved] == [3, 6, 9, 10], "and what is left when the run ends"
    assert [record.head != b"" for record in records.steps] == [False, False, True] * 3 + [False]


@pytest.mark.parametrize(
    "rule",
    [
        Verification(policy="self", quorum=1, share=0.5),
        Verification(**VerificationTable().model_dump()),
    ],
    ids=["a half", "by default"],
)
async def test_a_trainer_that_looks_for_itself_learns_nothing_from_a_cheat(tmp_path, monkeypatch, rule):
    @asynccontextmanager
    async def here(_node, _engine_class, _completions, _threads, **_options):
        """Open an engine in this process, which starts faster than a worker process."""
        yield engine()

    monkeypatch.setattr(NodeContext, "open_engine", here)
    run = changed_run(RUN, verification=rule)
    records = Records()

    async def work(swarm):
        await Node(run, TRAINER, swarm.join).train(6, records=records, first_samplers=2, folder=tmp_path)

    spy = await swarm_of(run, [engine(), OwnLuck(engine())], work)
    trained = {group.sampler for record in records.steps for group in record.groups}
    assert trained == {ANN.public}
    cheats = {group for group, group_message in spy.groups.items() if group_message.signer == BOB.public}
    reasons = {reason for group, reason in spy.refused.items() if group in cheats}
    assert "condemned" in reasons
    assert "muted" in reasons
    async with open_journal(tmp_path / "journal.sqlite", run.id) as journal:
        findings = await journal.findings()
    assert {(found.sampler, found.result) for found in findings} == {
        (ANN.public, "honest"),
        (BOB.public, "dishonest"),
    }


async def test_a_sequential_run_that_was_interrupted_comes_to_the_heads_of_one_that_was_not(tmp_path):
    """Sampling is keyed by heads, and heads by what was sampled.

    With the same random source there is one run, however often it is started.
    """
    run = changed_run(RUN, sync=Sync(async_from=None, head_every=1, in_flight=False, staleness=0))

    def trainer(swarm, spy_folder):
        def luck():
            return derive("luck", len(list((spy_folder / "weights" / "heads").iterdir())).to_bytes(8))

        return Node(run, TRAINER, swarm.join, luck=luck, folder=spy_folder)

    def interrupted_at(*moments, folder):
        async def work(swarm):
            for until in moments:
                records = Records()
                with trio.CancelScope() as life:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_cancel_after, records, until, life)
                        await trainer(swarm, folder).train(6, records=records, first_samplers=2)
                        nursery.cancel_scope.cancel()

        return work

    whole = await swarm_of(run, [engine(), engine()], interrupted_at(7, folder=tmp_path / "whole"))
    pieces = await swarm_of(run, [engine(), engine()], interrupted_at(1, 3, 4, 7, folder=tmp_path / "pieces"))
    assert [head.id for head in whole.chain] == [head.id for head in pieces.chain]
    assert len(whole.chain) == 7
    assert not whole.groups, "nothing is pushed"


async def test_by_quorum_only_what_a_verifier_vouches_for_is_trained_on(tmp_path):
    verifier = identity("verifier")
    run = changed_run(
        RUN,
        verification=Verification(policy="quorum", quorum=1, share=0.0),
        verifiers=(verifier.public,),
    )

    async def work(swarm):
        async with trio.open_nursery() as nursery:
            judge = Node(run, verifier, swarm.join)
            nursery.start_soon(lambda: judge.verify(engine=engine()))
            trainer = Node(run, TRAINER, swarm.join, folder=tmp_path)
            await trainer.train(4, records=Records(), first_samplers=2)
            nursery.cancel_scope.cancel()

    await swarm_of(run, [engine(), OwnLuck(engine())], work)
    trained = {
        group.id: group.sampler for each in read_records(tmp_path / "records.sqlite") for group in each.groups
    }
    assert set(trained.values()) == {ANN.public}
    async with open_journal(tmp_path / "journal.sqlite", run.id) as journal:
        vouched = {found.group for found in await journal.findings() if found.result == "honest"}
    assert trained.keys() <= vouched


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_across_twenty_restarts_nothing_acknowledged_is_lost(tmp_path):
    async def work(swarm):
        for until in range(2, 42, 2):
            await one_life(RUN, swarm, tmp_path, Records(), until, first_samplers=2, checkpoint_every=5)

    spy = await swarm_of(RUN, [engine(), engine()], work)
    records = read_records(tmp_path / "records.sqlite")
    check_commitments(spy, records[: len(spy.chain)])
    check_ages(spy, records, BOUND)
