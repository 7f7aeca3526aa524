"""A sampler that fails every attempt says so, waits longer, and ends where nothing can heal it."""

from __future__ import annotations

import pytest
import trio

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import ContractError, EngineError, PeerError
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import serve_deliveries
from echo_node.net.outbox.outbox import open_outbox
from echo_node.runs.run import read_model
from echo_node.sampler.attempts import FAILING, GIVE_UP, PAUSES, Attempts
from echo_node.sampler.loop import SamplerLoop
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from tests.crafting import ENGINE, SAMPLERS, TRAINER, open_run, roster
from tests.sampler.test_registration import Leader, until
from tests.weights.swarms import offering

RUN = open_run()
ANN = SAMPLERS[0]


def test_pauses_grow_with_each_failure_and_a_group_ends_them():
    attempts = Attempts()
    assert (attempts.pause, attempts.reason) == (0.0, None)
    found = []
    for number in range(len(PAUSES) + 1):
        assert (attempts.reason is not None) == (number >= FAILING)
        attempts.fail(EngineError("no memory is left"))
        found.append(attempts.pause)
    assert found == [*PAUSES, PAUSES[-1]]
    assert attempts.reason == "no memory is left"
    attempts.succeed()
    assert (attempts.pause, attempts.reason) == (0.0, None)


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([EngineError("x")] * GIVE_UP, True),
        ([ContractError("x")] * GIVE_UP, True),
        ([EngineError("x")] * (GIVE_UP - 1), False),
        ([PeerError("x")] * 3 * GIVE_UP, False),
        ([*[EngineError("x")] * (GIVE_UP - 1), PeerError("x"), EngineError("x")], False),
    ],
)
async def test_only_failures_of_this_machine_are_given_up(autojump_clock, errors, ends):  # noqa: ARG001
    attempts = Attempts()
    for error in errors:
        attempts.fail(error)
    with trio.move_on_after(1) as waiting, pytest.raises(type(errors[-1])):
        await attempts.raise_if_hopeless()
    assert waiting.cancelled_caught != ends


async def test_a_sampler_whose_contract_fails_says_so_and_ends_with_its_error_whatever_is_published(
    autojump_clock,
    tmp_path,
    monkeypatch,
):
    engine = make_engine(EngineSpec(ENGINE, embedded.folder(), rows=2, threads=1))
    model = read_model(embedded.folder())
    tries = []
    failing = trio.Event()
    with (
        WeightsStore.temporary(RUN.rules, layout_of(model)) as theirs,
        WeightsStore.temporary(RUN.rules, layout_of(model)) as store,
    ):
        async with (
            MemorySwarm() as swarm,
            swarm.join(ANN) as here,
            open_outbox(tmp_path / "outbox.sqlite") as outbox,
            offering(swarm.join, theirs, TRAINER) as network,
        ):
            loop = SamplerLoop(
                RUN, here, ANN, engine, Puller(here, store), outbox, slots_per_call=1, agent="a test"
            )
            began = []

            def stream(*_given):
                tries.append(autojump_clock.current_time())
                raise ContractError("the contract has no prompts")
                yield

            monkeypatch.setattr(loop._rollout, "stream", stream)
            leader = Leader(theirs, network)

            async def publish() -> None:
                await until(lambda: loop.status()["failing"] is not None)
                failing.set()
                began.append(len(tries))
                for step in range(1, 4):  # newer versions end no pause
                    leader._publisher.publish(model, step=step, roster=roster(ANN), groups=())
                    await trio.sleep(0.1)

            with serve_deliveries(network, leader.taker()):
                await leader.publish(ENGINE)
                with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012 - all of it may raise
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(publish)
                        nursery.start_soon(loop.work)
            assert raised.group_contains(ContractError, match="the contract has no prompts")
    assert failing.is_set()
    assert began == [FAILING]
    assert len(tries) == GIVE_UP
    assert tries[-1] - tries[0] > sum(PAUSES), "it waits between its attempts"
    engine.close()
