"""A sampler and its leader: it joins as soon as it can, and stops when the lease expires."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.election.lease import Lease
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import PeerError
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import Taker, serve_deliveries
from echo_node.net.outbox.outbox import open_outbox
from echo_node.runs.run import read_model
from echo_node.sampler.loop import SamplerLoop
from echo_node.sampler.registration import SETTLE_SECONDS
from echo_node.weights.publisher import Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import (
    Heartbeat,
    Join,
    Member,
    ProtocolError,
    Receipt,
    Refusal,
    RolloutRequest,
    Roster,
    open_sealed,
    read_batch,
    seal,
    topics,
)
from tests.crafting import SAMPLERS, TRAINER, Chain, open_run, roster
from tests.weights.swarms import offering

RUN = open_run()
ANN = SAMPLERS[0]


async def test_a_sampler_joins_soon_after_the_leader_has_come_however_long_that_took(
    autojump_clock, tmp_path
):
    engine = make_engine(EngineSpec("llama/f16", embedded.folder(), rows=2, threads=1))
    joined = trio.Event()

    async def welcome(message):
        join = open_sealed(message.data, Join, RUN.id, signer=message.sender)
        assert (join.signer, join.message.engine) == (ANN.public, "llama/f16")
        joined.set()
        await trio.lowlevel.checkpoint()
        return b""

    with WeightsStore.temporary(RUN.rules, layout_of(read_model(embedded.folder()))) as store:
        async with (
            MemorySwarm() as swarm,
            swarm.join(ANN) as network,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
            trio.open_nursery() as nursery,
        ):
            loop = SamplerLoop(
                RUN, network, ANN, engine, Puller(network, store), outbox, slots_per_call=1, agent="a test"
            )
            nursery.start_soon(loop.work)
            await trio.sleep(1000)
            assert loop.status()["joined"] is False
            async with swarm.join(TRAINER) as leader:
                topic = topics.topic(RUN.id, topics.JOINS)
                with serve_deliveries(leader, {topic: Taker(lambda _: ACCEPT, welcome)}):
                    came = autojump_clock.current_time()
                    await joined.wait()
                    waited = autojump_clock.current_time() - came
                    assert waited <= SETTLE_SECONDS + 5, (
                        "the clock may jump over a thread, but not by a whole pause"
                    )
            nursery.cancel_scope.cancel()
    engine.close()


@pytest.fixture
def patient_clock():
    """A clock that jumps only when threads have had time to do something."""
    return trio.testing.MockClock(autojump_threshold=0.2)


async def test_while_the_leader_is_silent_a_sampler_draws_nothing_and_goes_on_when_it_is_heard(
    patient_clock,  # noqa: ARG001 - it jumps
    tmp_path,
):
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), rows=2, threads=1))
    topic = topics.topic(RUN.id, topics.JOINS)

    async def welcome(_message):
        await trio.lowlevel.checkpoint()
        return b""

    with WeightsStore.temporary(RUN.rules, layout_of(read_model(embedded.folder()))) as store:
        head = (
            Publisher(store, TRAINER, luck=lambda: bytes(32))
            .publish(read_model(embedded.folder()), step=0, roster=roster(ANN), groups=())
            .head
        )
        lease = Lease(lambda: store.follower, 10.0, clock=lambda: 0.0)
        async with (
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as leader,
            swarm.join(ANN) as network,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
            trio.open_nursery() as nursery,
        ):
            lease.begin()
            await lease.wait_until_over()
            puller = Puller(network, store)
            loop = SamplerLoop(
                RUN, network, ANN, engine, puller, outbox, slots_per_call=1, agent="a test", lease=lease
            )
            with serve_deliveries(leader, {topic: Taker(lambda _: ACCEPT, welcome)}):
                nursery.start_soon(loop.work)
                await trio.sleep(100)
                assert loop.status()["joined"]
                assert loop.status()["leader_is_silent"]
                assert outbox.pending == 0, "groups for a chain that may be nobody's"
                beat = Heartbeat(head=head.id, term=1, time_ms=1, version=0, ext={})
                assert lease.take(open_sealed(seal(beat, TRAINER, RUN.id), Heartbeat, RUN.id))
                with trio.fail_after(100):
                    while not loop._delivery.waiting:  # noqa: ASYNC110 - an outbox has no event for this
                        await trio.sleep(0.1)
                assert not loop.status()["leader_is_silent"]
            nursery.cancel_scope.cancel()
    engine.close()


async def test_only_the_leader_itself_has_slots_filled(tmp_path):
    engine = make_engine(EngineSpec("llama/f16", embedded.folder(), rows=2, threads=1))
    wish = RolloutRequest(count=1, first=0, head=bytes(32))
    with WeightsStore.temporary(RUN.rules, layout_of(read_model(embedded.folder()))) as store:
        async with (
            MemorySwarm() as swarm,
            swarm.join(ANN) as network,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
        ):
            loop = SamplerLoop(
                RUN, network, ANN, engine, Puller(network, store), outbox, slots_per_call=1, agent="a test"
            )
            stranger = SAMPLERS[1]
            with pytest.raises(ProtocolError, match="another key"):
                await loop._answer(stranger.public, seal(wish, stranger, RUN.id))
            with pytest.raises(PeerError, match="signed by another peer"):
                await loop._answer(stranger.public, seal(wish, TRAINER, RUN.id))
            assert engine.loaded is None, "nothing was fetched or drawn for them"
    engine.close()


async def test_groups_too_long_for_gossip_wait_where_no_pruning_reaches_them(tmp_path):
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), rows=2, threads=1))

    async def welcome(_message):
        await trio.lowlevel.checkpoint()
        return b""

    with WeightsStore.temporary(RUN.rules, layout_of(read_model(embedded.folder()))) as store:
        Publisher(store, TRAINER, luck=lambda: bytes(32)).publish(
            read_model(embedded.folder()), step=0, roster=roster(ANN), groups=()
        )
        async with (
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as leader,
            swarm.join(ANN) as network,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
            trio.open_nursery() as nursery,
        ):
            puller = Puller(network, store)
            loop = SamplerLoop(RUN, network, ANN, engine, puller, outbox, slots_per_call=1, agent="a test")
            loop._delivery._longest = 0
            topic = topics.topic(RUN.id, topics.JOINS)
            before = {*store.blobs.all()}
            with serve_deliveries(leader, {topic: Taker(lambda _: ACCEPT, welcome)}):
                nursery.start_soon(loop.work)
                with trio.fail_after(100):
                    while not loop._delivery.waiting:  # noqa: ASYNC110 - an outbox has no event for this
                        await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert len([*store.lent.all()]) >= 1
        assert {*store.blobs.all()} == before
    engine.close()


class Leader:
    """A leader that accepts joins, and whose rosters name samplers and classes as a test wants."""

    def __init__(self, store, network) -> None:
        self._publisher = Publisher(store, TRAINER, luck=lambda: bytes(32))
        self._network = network
        self.joins: list[str] = []
        self.refuses: str | None = None

    def taker(self):
        async def welcome(message):
            await trio.lowlevel.checkpoint()
            if self.refuses:
                raise PeerError(self.refuses)
            self.joins.append(open_sealed(message.data, Join, RUN.id, signer=ANN.public).message.engine)
            return b""

        return {topics.topic(RUN.id, topics.JOINS): Taker(lambda _: ACCEPT, welcome)}

    async def publish(self, engine: str):
        """The next version, whose roster has one sampler with this class."""
        told = Roster((Member(ANN.public, engine, bytes(32)),))
        tip = self._publisher.tip
        step = tip.message.step + 1 if tip else 0
        head = self._publisher.publish(read_model(embedded.folder()), step=step, roster=told, groups=()).head
        await self._network.publish(topics.topic(RUN.id, topics.HEADS), head.sealed)
        return head

    async def refuse(self, head, groups) -> None:
        told = Receipt(
            accepted=b"",
            head=head.id,
            rate=None,
            refused=(Refusal("wrong-engine", b"".join(groups)),),
            term=1,
            version=head.message.version,
        )
        sealed = seal(told, TRAINER, RUN.id)
        await self._network.publish(topics.topic(RUN.id, topics.RECEIPTS), sealed)


@asynccontextmanager
async def led(tmp_path, engine_class: str):
    """A leader, and a sampler that is about to work."""
    engine = make_engine(EngineSpec(engine_class, embedded.folder(), rows=2, threads=1))
    layout = layout_of(read_model(embedded.folder()))
    try:
        with (
            WeightsStore.temporary(RUN.rules, layout) as theirs,
            WeightsStore.temporary(RUN.rules, layout) as store,
        ):
            async with (
                MemorySwarm() as swarm,
                offering(swarm.join, theirs, TRAINER) as network,
                swarm.join(ANN) as here,
                open_outbox(tmp_path / "outbox.sqlite") as outbox,
                trio.open_nursery() as nursery,
            ):
                loop = SamplerLoop(
                    RUN, here, ANN, engine, Puller(here, store), outbox, slots_per_call=1, agent="a test"
                )
                leader = Leader(theirs, network)
                with serve_deliveries(network, leader.taker()):
                    yield leader, loop, nursery
                nursery.cancel_scope.cancel()
    finally:
        engine.close()


async def until(holds) -> None:
    with trio.fail_after(100):
        while not holds():  # noqa: ASYNC110 - there is no event for this
            await trio.sleep(0.01)


async def test_a_sampler_that_the_roster_names_with_another_engine_joins_again_and_draws_nothing_before(
    tmp_path,
):
    async with led(tmp_path, "llama/f16") as (leader, loop, nursery):
        await leader.publish("torch/f32")
        nursery.start_soon(loop.work)
        await until(lambda: len(leader.joins) >= 2)
        await leader.publish("torch/f32")
        await until(lambda: len(leader.joins) >= 3)
        assert not loop.status()["joined"]
        assert loop.status()["waiting"] == 0, "it would be refused, and held against this sampler"
        head = await leader.publish("llama/f16")
        await until(lambda: loop.status()["waiting"])
        assert loop.status()["joined"]
        assert {each.head for each in loop._delivery._posted.values()} == {head.id}
        assert set(leader.joins) == {"llama/f16"}

        said = len(leader.joins)
        head = await leader.publish("torch/f32")  # as one does that knows an earlier join alone
        await until(lambda: any(each.head == head.id for each in loop._delivery._posted.values()))
        assert len(leader.joins) == said
        await leader.refuse(
            head, [group for group, each in loop._delivery._posted.items() if each.head == head.id]
        )
        await until(lambda: len(leader.joins) > said)
        assert not loop.status()["joined"]
        await leader.publish("llama/f16")
        await until(lambda: loop.status()["joined"])


async def test_a_sampler_that_the_roster_names_with_another_engine_does_not_answer_the_leader(tmp_path):
    async with led(tmp_path, "llama/f16") as (leader, loop, nursery):
        head = await leader.publish("torch/f32")
        nursery.start_soon(loop.work)
        await until(lambda: loop.status()["version"] == 0)
        request = RolloutRequest(count=1, first=0, head=head.id)
        with pytest.raises(PeerError, match="roster with llama/f16"):
            await loop._answer(TRAINER.public, seal(request, TRAINER, RUN.id))
        head = await leader.publish("llama/f16")
        request = RolloutRequest(count=1, first=0, head=head.id)
        assert len(read_batch(await loop._answer(TRAINER.public, seal(request, TRAINER, RUN.id)))) == 1


async def test_a_sampler_that_is_turned_away_says_why(tmp_path):
    async with led(tmp_path, "torch/f32") as (leader, loop, nursery):
        leader.refuses = "you joined with llama/q8_0"
        nursery.start_soon(loop.work)
        await until(lambda: loop.status()["turned_away"])
        assert "you joined with llama/q8_0" in loop.status()["turned_away"]
        leader.refuses = None
        await until(lambda: leader.joins)
        await until(lambda: loop.status()["turned_away"] is None)


async def test_in_a_new_term_a_sampler_looks_whether_the_new_leader_knows_it_as_it_is(tmp_path):
    async with led(tmp_path, "torch/f32") as (_leader, loop, nursery):
        chain = Chain(RUN)
        send, heads = trio.open_memory_channel(3)
        loop._chain.wait_for_newer = lambda _known: heads.receive()
        loop._registration._joined.set()
        nursery.start_soon(loop._follow_chain)
        for term, joined in ((1, True), (1, True), (2, False)):
            await send.send(chain.next(ANN, term=term))
            await trio.testing.wait_all_tasks_blocked()
            assert loop.status()["joined"] is joined
