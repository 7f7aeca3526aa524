"""The verifier in a swarm: signed verdicts tell the cheating sampler from the honest ones."""

from __future__ import annotations

import hashlib

import pytest
import trio

from echo_node.contract import load
from echo_node.credit.ledger import Ledger
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.runs.run import Run, draft
from echo_node.telemetry.metrics import Records
from protocol import Identity, TrajectoryGroup, Verdict, read_batch, topics
from protocol.manifest import Sampling, Sync
from protocol.verdict import check_draw
from tests.cheats import ChosenGroups, DiesAtRandom, OwnLuck, better_half


def identity(name):
    return Identity(hashlib.sha256(name.encode()).digest())


TRAINER, HONEST, CHEAT, VERIFIER = map(identity, ("trainer", "honest", "cheat", "verifier"))


def open_run(*, jailed=True, mode="async"):
    sealed = draft(
        name="watched",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={"batch_groups": 8},
        sampling_=Sampling(group_size=4, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(
            async_from=0 if mode == "async" else None,
            head_every=1,
            in_flight=False,
            staleness=4 if mode == "async" else 0,
        ),
        author=TRAINER,
        trainers=[TRAINER.public],
        verifiers=[VERIFIER.public],
        nonce=bytes(32),
    )
    return Run.open(sealed, embedded.folder(), jailed=jailed)


def engine():
    return make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))


@pytest.mark.parametrize("mode", ["async", "sequential"])
async def test_a_cheat_among_the_honest_is_condemned_and_nobody_else(mode, tmp_path):
    run = open_run(mode=mode)
    verdicts, samplers = [], {}
    ledger = Ledger(tmp_path / "ledger.sqlite")
    enough = trio.Event()

    async def listen(network, cargo, note):
        async with network.subscribe(
            topics.topic(run.id, cargo), lambda _: ACCEPT, capacity=100_000
        ) as inbox:
            async for message in inbox:
                for envelope in read_batch(message.data):
                    note(envelope)

    def group(envelope):
        if is_announcement(envelope):
            return
        opened = envelope.open(TrajectoryGroup, run.id)
        samplers[opened.id] = opened.signer

    def verdict(envelope):
        opened = envelope.open(Verdict, run.id)
        assert opened.signer == VERIFIER.public
        check_draw(VERIFIER.public, run.id, opened.message.group, opened.message.draw)
        verdicts.append(opened.message)
        results = [each.result for each in verdicts]
        if results.count("honest") >= 8 and "dishonest" in results:
            enough.set()

    async with MemorySwarm() as swarm, trio.open_nursery() as nursery, swarm.join(identity("spy")) as spy:
        nursery.start_soon(listen, spy, topics.GROUPS, group)
        nursery.start_soon(listen, spy, topics.VERDICTS, verdict)
        judge = Node(run, VERIFIER, swarm.join)
        engines = [engine() for _ in range(3)]
        nursery.start_soon(lambda: judge.verify(engine=engines[0], ledger=ledger))
        nursery.start_soon(lambda: Node(run, HONEST, swarm.join).sample(slots_per_call=8, engine=engines[1]))
        nursery.start_soon(
            lambda: Node(run, CHEAT, swarm.join).sample(slots_per_call=8, engine=OwnLuck(engines[2]))
        )
        nursery.start_soon(
            lambda: Node(run, TRAINER, swarm.join).train(10_000, records=Records(), first_samplers=2)
        )
        with trio.fail_after(100):
            await enough.wait()
        nursery.cancel_scope.cancel()
    run.close()
    found = {
        result: {
            samplers[each.group] for each in verdicts if each.result == result and each.group in samplers
        }
        for result in ("honest", "dishonest")
    }
    assert found == {"honest": {HONEST.public}, "dishonest": {CHEAT.public}}
    condemned = next(each for each in verdicts if each.result == "dishonest")
    assert condemned.reason in {"token-out-of-reach", "luck-not-its-own"}
    assert condemned.figures.reward is None, "no reward was computed for it"
    assert judge.verdicts["honest"] >= 8
    with ledger:
        assert ledger.credit(HONEST.public).tokens > 0, "verified tokens are credited"
        assert ledger.credit(CHEAT.public).tokens == 0


async def test_who_sends_the_better_half_is_found_and_who_dies_at_random_is_not(monkeypatch):
    """Both leave holes in what they announced; every token and reward of both is honest."""
    run = open_run()
    cheats = {CHEAT.public: better_half, HONEST.public: DiesAtRandom(1)}
    ChosenGroups(cheats).install(monkeypatch)
    samplers, verdicts, found = {}, [], trio.Event()

    async def listen(network, cargo, note):
        topic = topics.topic(run.id, cargo)
        async with network.subscribe(topic, lambda _: ACCEPT, capacity=10_000) as inbox:
            async for message in inbox:
                for envelope in read_batch(message.data):
                    note(envelope)

    def group(envelope):
        samplers[envelope.id] = envelope.signer

    def verdict(envelope):
        message = envelope.open(Verdict, run.id).message
        verdicts.append(message)
        if message.result == "dishonest" and samplers.get(message.group) == CHEAT.public:
            found.set()

    async with MemorySwarm() as swarm, trio.open_nursery() as nursery, swarm.join(identity("spy")) as spy:
        nursery.start_soon(listen, spy, topics.GROUPS, group)
        nursery.start_soon(listen, spy, topics.VERDICTS, verdict)
        engines = [engine() for _ in range(3)]
        nursery.start_soon(lambda: Node(run, VERIFIER, swarm.join).verify(engine=engines[0]))
        for key, its_engine in ((HONEST, engines[1]), (CHEAT, engines[2])):
            nursery.start_soon(
                lambda key=key, its_engine=its_engine: Node(run, key, swarm.join).sample(
                    slots_per_call=8, engine=its_engine
                )
            )
        nursery.start_soon(
            lambda: Node(run, TRAINER, swarm.join).train(10_000, records=Records(), first_samplers=2)
        )
        with trio.fail_after(110):
            await found.wait()
        nursery.cancel_scope.cancel()
    run.close()
    condemned = {(samplers[each.group], each.reason) for each in verdicts if each.result == "dishonest"}
    assert condemned == {(CHEAT.public, "skipped-slots")}
    assert HONEST.public in {samplers.get(each.group) for each in verdicts if each.result == "honest"}


async def test_only_a_key_that_the_run_names_is_a_verifier():
    async with MemorySwarm() as swarm:
        with pytest.raises(ConfigError, match="none of the run's verifiers"):
            await Node(open_run(jailed=False), HONEST, swarm.join).verify()
