"""A sampler and its leader: it knocks as soon as there is a door, and works for nobody who has fallen silent."""

from __future__ import annotations

import pytest
import trio

from echo_node import embedded
from echo_node.engine.kinds import EngineSpec, make_engine
from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.deliveries import Taker, serve_deliveries
from echo_node.net.outbox.outbox import open_outbox
from echo_node.run import read_model
from echo_node.sampler.loop import SETTLE_SECONDS, SamplerLoop
from echo_node.terms.lease import Lease
from echo_node.weights.publish import Publisher
from echo_node.weights.pull import Puller
from echo_node.weights.state import layout_of
from echo_node.weights.store import WeightsStore
from protocol import Heartbeat, Join, ProtocolError, RolloutRequest, open_sealed, seal, topics
from tests.crafting import SAMPLERS, TRAINER, open_run, roster

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


async def test_while_the_leader_is_silent_a_sampler_draws_nothing_and_goes_on_when_it_is_heard(
    autojump_clock,  # noqa: ARG001 - it jumps
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
        lease = Lease(lambda: store.follower, 10.0)
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
                    while not outbox.pending:  # noqa: ASYNC110 - an outbox has no event for this
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
            with pytest.raises(PeerError, match="somebody else has signed"):
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
            loop._post._longest = 0
            topic = topics.topic(RUN.id, topics.JOINS)
            before = {*store.blobs.all()}
            with serve_deliveries(leader, {topic: Taker(lambda _: ACCEPT, welcome)}):
                nursery.start_soon(loop.work)
                with trio.fail_after(100):
                    while not outbox.pending:  # noqa: ASYNC110 - an outbox has no event for this
                        await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert len([*store.lent.all()]) >= 1
        assert {*store.blobs.all()} == before
    engine.close()
