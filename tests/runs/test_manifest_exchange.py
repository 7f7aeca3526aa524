"""How newcomers hear of runs, on the in-memory network."""

from contextlib import AsyncExitStack

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.net.memory import MemorySwarm
from echo_node.runs import manifest_exchange
from echo_node.runs.manifest_exchange import find_manifest, open_runs, serve_manifest
from protocol import Identity, topics
from tests.crafting import SAMPLERS, TRAINER, changed_run, open_run

RUN = open_run()
OTHER = changed_run(RUN, name="another run")
ANN, NEWCOMER = SAMPLERS[0], Identity(bytes(31) + b"n")


async def test_whoever_works_in_a_run_hands_out_its_manifest(autojump_clock):  # noqa: ARG001 - it jumps
    async with (
        MemorySwarm() as swarm,
        swarm.join(ANN) as ann,
        swarm.join(NEWCOMER) as newcomer,
        serve_manifest(ann, RUN.sealed_manifest),
    ):
        assert (await find_manifest(newcomer, RUN.id)).sealed == RUN.sealed_manifest.sealed
        with pytest.raises(PeerError, match="nobody who could be reached"):
            await find_manifest(newcomer, OTHER.id)
        assert await open_runs(newcomer) == []


async def test_somebody_who_comes_late_is_found_as_well(autojump_clock):  # noqa: ARG001 - it jumps
    found = []
    async with MemorySwarm() as swarm, swarm.join(NEWCOMER) as newcomer, trio.open_nursery() as nursery:

        async def look():
            found.append(await find_manifest(newcomer, RUN.id))

        nursery.start_soon(look)
        await trio.sleep(20)
        assert not found
        async with swarm.join(ANN) as ann, serve_manifest(ann, RUN.sealed_manifest):
            await trio.sleep(20)
            assert found[0].id == RUN.id


async def test_a_manifest_of_another_run_is_refused(autojump_clock):  # noqa: ARG001 - it jumps
    async def lie(_peer, _asked):
        await trio.lowlevel.checkpoint()
        return OTHER.sealed_manifest.sealed

    async with MemorySwarm() as swarm, swarm.join(ANN) as liar, swarm.join(NEWCOMER) as newcomer:
        with liar.serve(topics.MANIFEST_STREAM, lie, most=32):
            with pytest.raises(PeerError):
                await find_manifest(newcomer, RUN.id)
            assert newcomer.scores()[ANN.public] == {"wrong-run": 1}, "it is asked once"


async def test_an_open_run_is_told_by_its_own_trainers_alone(autojump_clock):  # noqa: ARG001 - it jumps
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as trainer,
        swarm.join(ANN) as stranger,
        swarm.join(NEWCOMER) as newcomer,
        serve_manifest(trainer, RUN.sealed_manifest, lambda: True),
        serve_manifest(stranger, OTHER.sealed_manifest, lambda: True),
    ):
        await trio.sleep(1)
        assert [run.id for run in await open_runs(newcomer)] == [RUN.id]
        assert newcomer.scores() == {ANN.public: {"wrong-run": 1}}


async def test_a_run_is_open_from_the_moment_that_its_operator_says_so(autojump_clock):  # noqa: ARG001 - it jumps
    said = []
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as trainer,
        swarm.join(NEWCOMER) as newcomer,
        serve_manifest(trainer, RUN.sealed_manifest, lambda: bool(said)),
    ):
        await trio.sleep(100)
        assert await open_runs(newcomer) == []
        said.append("open")
        await trio.sleep(2 * manifest_exchange.OPEN_SECONDS)
        assert [run.message.name for run in await open_runs(newcomer)] == [RUN.manifest.name]
        said.clear()
        assert await open_runs(newcomer) == [], "whoever still finds its trainer is told no more"


@pytest.mark.parametrize("answer", [b"", b"\x00" * 40, b"\xff" * 1000])
async def test_what_is_no_manifest_is_held_against_its_sender(answer, autojump_clock):  # noqa: ARG001 - it jumps
    async def nonsense(_peer, _asked):
        await trio.lowlevel.checkpoint()
        return answer

    async with MemorySwarm() as swarm, swarm.join(ANN) as liar, swarm.join(NEWCOMER) as newcomer:
        with liar.serve(topics.MANIFEST_STREAM, nonsense, most=32):
            with pytest.raises(PeerError):
                await find_manifest(newcomer, RUN.id)
            assert sum(newcomer.scores()[ANN.public].values()) == 1


async def test_many_who_keep_silent_hold_up_nobody(autojump_clock):  # noqa: ARG001 - it jumps
    async def say_nothing(_peer, _asked):
        await trio.sleep_forever()

    silent = [Identity(bytes([7]) * 31 + bytes([number])) for number in range(10)]
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(MemorySwarm())
        newcomer = await stack.enter_async_context(swarm.join(NEWCOMER))
        for each in silent:
            network = await stack.enter_async_context(swarm.join(each))
            stack.enter_context(network.serve(topics.MANIFEST_STREAM, say_nothing, most=32))
        trainer = await stack.enter_async_context(swarm.join(TRAINER))
        await stack.enter_async_context(serve_manifest(trainer, RUN.sealed_manifest, lambda: True))
        began = trio.current_time()
        assert (await find_manifest(newcomer, RUN.id)).id == RUN.id
        assert trio.current_time() - began < 2 * manifest_exchange.ASK_SECONDS
        assert [run.id for run in await open_runs(newcomer)] == [RUN.id]
