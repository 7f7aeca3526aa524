"""A head whose weights left with the leader: a sampler pulls them soon after a peer has them."""

from __future__ import annotations

import trio

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import serve_deliveries
from echo_node.net.outbox.outbox import open_outbox
from echo_node.runs.run import read_model
from echo_node.sampler.loop import SamplerLoop
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from tests.crafting import ENGINE, SAMPLERS, TRAINER, open_run, roster
from tests.sampler.test_registration import Leader, until
from tests.weights.swarms import offering

RUN = open_run()
ANN = SAMPLERS[0]
SOON_SECONDS = 5.0


async def test_weights_that_went_with_the_leader_are_fetched_soon_after_it_is_back(
    autojump_clock, tmp_path, caplog
):
    engine = make_engine(EngineSpec(ENGINE, embedded.folder(), rows=2, threads=1))
    model = read_model(embedded.folder())
    with (
        WeightsStore.temporary(RUN.rules, layout_of(model)) as theirs,
        WeightsStore.temporary(RUN.rules, layout_of(model)) as store,
    ):
        async with (
            MemorySwarm() as swarm,
            swarm.join(ANN) as here,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
            trio.open_nursery() as nursery,
        ):
            puller = Puller(here, store)
            loop = SamplerLoop(RUN, here, ANN, engine, puller, outbox, slots_per_call=1, agent="a test")
            async with offering(swarm.join, theirs, TRAINER) as network:
                leader = Leader(theirs, network)
                with serve_deliveries(network, leader.taker()):
                    await leader.publish(ENGINE)
                    nursery.start_soon(loop.work)
                    await until(lambda: loop.status()["engine_version"] == 0)
            made = leader._publisher.publish(model, step=1, roster=roster(ANN), groups=())
            await puller.chain.take_head(made.head.sealed)
            await until(
                lambda: caplog.text.count("next try in 30 s") == 2
            )  # the longest pause has just begun
            assert loop.status()["engine_version"] == 0
            async with offering(swarm.join, theirs, TRAINER):
                came = autojump_clock.current_time()
                await until(lambda: loop.status()["engine_version"] == 1)
                assert autojump_clock.current_time() - came < SOON_SECONDS
            nursery.cancel_scope.cancel()
    engine.close()
