"""The training loop on the in-memory network, proven from records and signatures."""

import hashlib
from collections import Counter
from contextlib import suppress

import psutil
import pytest
import trio

from echo_node.config import DemoConfig
from echo_node.demo.swarm import Demo
from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.node import Node
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.sampler.loop import SamplerLoop
from echo_node.telemetry.metrics import Records
from protocol import (
    ZERO,
    Identity,
    Join,
    TrajectoryGroup,
    WeightsHead,
    merkle_root,
    open_sealed,
    peer_id,
    read_batch,
    seal,
    topics,
)


class Eavesdropper:
    """A peer that receives all gossip of a run, to compare it with the records."""

    def __init__(self, run):
        self.run = run
        self.heads = {}
        self.groups = {}

    async def listen(self, network, ready):
        async with (
            network.subscribe(
                topics.topic(self.run, topics.HEADS), lambda _: ACCEPT, capacity=100_000
            ) as heads,
            network.subscribe(
                topics.topic(self.run, topics.GROUPS), lambda _: ACCEPT, capacity=100_000
            ) as groups,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._hear_heads, heads)
            nursery.start_soon(self._hear_groups, groups)
            ready.set()

    async def _hear_heads(self, inbox):
        with suppress(PeerError):  # the swarm is over
            async for message in inbox:
                head = open_sealed(message.data, WeightsHead, self.run)
                self.heads[head.id] = head

    async def _hear_groups(self, inbox):
        with suppress(PeerError):
            async for message in inbox:
                for envelope in read_batch(message.data):
                    if is_announcement(envelope):
                        continue
                    group = envelope.open(TrajectoryGroup, self.run)
                    self.groups[group.id] = group


async def play(config: DemoConfig, beside=None) -> tuple[Demo, Eavesdropper]:
    """Run a demo with somebody listening, and something else beside it."""
    demo = Demo(config, Records())
    spy = Eavesdropper(demo._open_run(jailed=False).id)
    joined = MemorySwarm.__aenter__

    async def enter_with_spy(swarm):
        await joined(swarm)
        ready = trio.Event()

        async def listen():
            async with swarm.join(Identity(hashlib.sha256(b"spy").digest())) as network:
                await spy.listen(network, ready)

        swarm.nursery.start_soon(listen)
        await ready.wait()
        return swarm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemorySwarm, "__aenter__", enter_with_spy)
        async with trio.open_nursery() as nursery:
            if beside is not None:
                nursery.start_soon(beside, demo)
            await demo.play()
    return demo, spy


def weights_of(spy: Eavesdropper) -> list[bytes]:
    """The roots of all versions, in order: equal roots are equal weights, bit for bit."""
    heads = sorted(spy.heads.values(), key=lambda head: head.message.version)
    assert [head.message.version for head in heads] == list(range(len(heads)))
    return [head.message.root for head in heads]


def check_commitments(demo: Demo, spy: Eavesdropper) -> None:
    """Each head commits to exactly the groups that the record of its step names."""
    assert len(spy.heads) == len(demo.records.steps) + 1
    for record in demo.records.steps:
        head = spy.heads[record.head].message
        assert head.groups == merkle_root(sorted(group.id for group in record.groups))
        assert (head.step, head.version) == (record.step, record.version)


async def test_in_sequential_mode_every_group_is_of_the_steps_own_version():
    demo, spy = await play(DemoConfig(mode="sequential", steps=4, batch_groups=8, group_size=4))
    check_commitments(demo, spy)
    previous = next(head.id for head in spy.heads.values() if head.message.version == 0)
    for record in demo.records.steps:
        assert {group.head for group in record.groups} == {previous}, "one head, that of the version before"
        assert len({group.sampler for group in record.groups}) == 2
        assert sorted(group.slot for group in record.groups) == sorted([*range(4), *range(4)])
        assert set(record.staleness) == {0}
        previous = record.head
    assert not spy.groups, "nothing is pushed"


@pytest.mark.timeout(300)
async def test_who_is_asked_hears_what_was_taken_and_knows_its_pace(monkeypatch):
    config = DemoConfig(mode="sequential", steps=10_000, batch_groups=8, group_size=4)
    demo = Demo(config, Records())
    loops, work = [], SamplerLoop.work
    monkeypatch.setattr(SamplerLoop, "work", lambda loop: (loops.append(loop), work(loop))[1])

    def sampler_status():
        return [node.status() for node in demo.samplers]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(demo.play)
        with trio.fail_after(200):
            while not demo.samplers or any(each.get("accepted", 0) < 8 for each in sampler_status()):  # noqa: ASYNC110 - it is plain data
                await trio.sleep(0.05)
        assert all(each["seconds_per_group"] > 0 and not each["refused"] for each in sampler_status())
        used = Counter(peer_id(group.sampler) for record in demo.records.steps for group in record.groups)
        for node, each in zip(demo.samplers, sampler_status(), strict=True):
            assert 8 <= each["accepted"] <= used[node.peer_id] + 4, "4 of each batch are its own"
        assert [loop._throughput._steps > 0 for loop in loops] == [True, True], "steps are measured as well"
        nursery.cancel_scope.cancel()


async def test_with_one_seed_sequential_runs_give_the_same_weights_bit_for_bit():
    config = DemoConfig(mode="sequential", steps=5, batch_groups=8, group_size=4, seed=3)
    (first, one), (_, two) = await play(config), await play(config)
    roots = weights_of(one)
    assert roots == weights_of(two)
    assert len(set(roots)) == 6, "and every step changes them"
    other = config.model_copy(update={"seed": 4})
    assert weights_of((await play(other))[1])[1:] != roots[1:]
    assert first.records.steps[0].tokens > 0


@pytest.mark.parametrize("staleness", [0, 2])
async def test_in_asynchronous_mode_nothing_older_than_the_bound_is_trained_on(staleness):
    config = DemoConfig(mode="async", steps=12, batch_groups=8, group_size=4, staleness=staleness)
    demo, spy = await play(config)
    check_commitments(demo, spy)
    steps = {head.id: head.message.step for head in spy.heads.values()}
    used = [group.id for record in demo.records.steps for group in record.groups]
    assert len(used) == len(set(used)) == 12 * 8, "nothing is used twice"
    for record in demo.records.steps:
        for trained in record.groups:
            group = spy.groups[trained.id]
            assert group.signer == trained.sampler
            age = record.step - 1 - steps[group.message.heads[0]]
            assert 0 <= age <= staleness


async def test_in_flight_groups_name_the_head_of_each_span_and_are_as_stale_as_the_oldest():
    config = DemoConfig(mode="async", steps=12, batch_groups=48, group_size=8, samplers=1, in_flight=True)
    demo, spy = await play(config)
    check_commitments(demo, spy)
    steps = {head.id: head.message.step for head in spy.heads.values()}
    switched = [group.message for group in spy.groups.values() if len(group.message.heads) > 1]
    assert switched, "a head arrives while the next groups are drawn"
    for group in switched:
        drawn_under = [steps[head] for head in group.heads]
        assert drawn_under == sorted(drawn_under)
        for completion in group.completions():
            assert 1 <= len(completion.stretches) <= 2, "one switch at most"
            assert completion.stretches[-1].end == len(completion.ids)
    trained = {each.id: record for record in demo.records.steps for each in record.groups}
    both = trained.keys() & {key for key, group in spy.groups.items() if len(group.message.heads) > 1}
    assert both, "they are admitted and used"
    for key in both:
        record, oldest = trained[key], steps[spy.groups[key].message.heads[0]]
        assert record.step - 1 - oldest <= config.staleness


@pytest.mark.parametrize(("engine", "most"), [("torch/f32", 1e-8), ("llama/f32", 1e-8), ("llama/f16", 1e-6)])
async def test_importance_weights_are_one_when_the_versions_agree(engine, most):
    """The engine's log-probabilities equal the trainer's own, of the same weights."""
    demo, _ = await play(
        DemoConfig(mode="sequential", steps=3, batch_groups=8, group_size=4, engine=engine, seed=1)
    )
    for record in demo.records.steps:
        assert record.mismatch_kl < most, (
            "mean of r - 1 - log r, about half the square of the weight's distance from 1"
        )
        assert record.effective_sample_share > 1 - 100 * most
        assert record.clip_share == 0


async def test_an_engine_that_is_killed_is_started_again_and_its_slots_are_filled():
    """The slots of a head are keyed, so that the step is the same as without the kill."""
    config = DemoConfig(mode="sequential", steps=4, batch_groups=8, group_size=4, samplers=1, seed=3)
    _, undisturbed = await play(config)

    async def kill_one(demo):
        while not demo.records.steps:  # noqa: ASYNC110 - records are plain data and have no event
            await trio.sleep(0.01)
        engine = next(
            child
            for child in psutil.Process().children()
            if "echo_node.engine.worker.main" in child.cmdline()
        )
        engine.kill()

    _, disturbed = await play(config, beside=kill_one)
    assert weights_of(disturbed) == weights_of(undisturbed)
    assert not [child for child in psutil.Process().children() if "serving" in " ".join(child.cmdline())]


async def test_cancelling_ends_everything_at_once():
    demo = Demo(DemoConfig(mode="async", steps=10_000, batch_groups=8, group_size=4), Records())
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(demo.play)
            while not demo.records.steps:  # noqa: ASYNC110 - records are plain data and have no event
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert demo.records.steps


async def test_a_stranger_that_joins_and_never_answers_does_not_end_the_trainer(monkeypatch):
    """Version 0 has only the stranger in its roster; an honest sampler joins later."""
    monkeypatch.setattr("echo_node.trainer.batch_source.NOBODY_SECONDS", 0.2)
    demo = Demo(DemoConfig(mode="sequential", steps=2, batch_groups=4, group_size=2), Records())
    run, trainer = demo._open_run(jailed=False), demo._identity("trainer")
    join = Join(agent="", engine="torch/f32", head=ZERO, name="")
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        stranger = Identity(hashlib.sha256(b"stranger").digest())

        async def join_and_be_silent():
            async with swarm.join(stranger) as network:
                while True:
                    with suppress(PeerError):
                        sealed = seal(join, stranger, run.id)
                        await deliver(
                            network, trainer.public, topics.topic(run.id, topics.JOINS), sealed, deadline=5
                        )
                        break
                    await trio.sleep(0.02)
                with network.serve(topics.ROLLOUT_STREAM, refuse, most=5000):
                    await trio.sleep_forever()

        async def refuse(_peer, _asked):
            raise PeerError("not today")

        async def come_late():
            await trio.sleep(1.0)
            await Node(run, demo._identity("sampler 0"), swarm.join).sample()

        nursery.start_soon(join_and_be_silent)
        nursery.start_soon(come_late)
        with trio.fail_after(60):
            await Node(run, trainer, swarm.join).train(2, records=demo.records, first_samplers=1)
        nursery.cancel_scope.cancel()
    assert [record.step for record in demo.records.steps] == [1, 2]
    assert {group.sampler for record in demo.records.steps for group in record.groups} == {
        demo._identity("sampler 0").public
    }
