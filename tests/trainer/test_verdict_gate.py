"""The verdict gate: what the run's policy does not let in is never learnt from."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
import trio
import trio.testing

from echo_node.contract import Prompt
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import NEWCOMER
from echo_node.telemetry.metrics import Records
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import TrajectoryGroup, Verdict, open_sealed, read_batch, topics
from protocol.manifest import Verification
from tests.crafting import (
    END,
    ENGINE,
    SAMPLERS,
    TRAINER,
    changed_run,
    completion,
    open_run,
    right_answer,
    sealed_group,
)
from tests.records import record_of
from tests.trainer.test_verdict_policy import VERIFIERS, give_verdict

HEAD = b"h" * 32
ROUGH = "llama/f16"
ANN, BOB = SAMPLERS[:2]


def run_of(policy, *, quorum=1, share=0.25, verifiers=1, rough=1.0):
    run = open_run("sequential", staleness=0)
    engines = [replace(each, share=rough) if each.engine == ROUGH else each for each in run.manifest.engines]
    return changed_run(
        run,
        engines=tuple(engines),
        verification=Verification(policy=policy, quorum=quorum, share=share),
        verifiers=tuple(each.public for each in VERIFIERS[:verifiers]),
    )


def group(run, slot, sampler=ANN, *, teaches=True, **changes) -> RolloutRecord:
    right = right_answer(run, HEAD, sampler.public, slot)
    completions = [right, completion([END], reward=0.0) if teaches else right]
    opened = open_sealed(
        sealed_group(run, HEAD, sampler, slot, completions, **changes), TrajectoryGroup, run.id
    )
    return record_of(opened, 0, Prompt("r12345="))


class Place:
    """A trainer that has asked for groups, and verifiers that say what a test lets them say."""

    def __init__(self, run, network):
        self.run = run
        self.policy = VerdictPolicy(run, TRAINER)
        self.receipts = Receipts(network, TRAINER, run.id)
        self.left_out = Counter()
        self.gate = VerdictGate(run, network, self.policy, self.receipts, self.left_out)
        self.let_in = None

    async def ask(self, groups):
        for each in groups:
            self.policy.saw(each.id, each.sampler)
        self.let_in = await self.gate.let_in(groups)

    async def give_verdict(self, groups, verifier=VERIFIERS[0], result="honest"):
        for each in groups:
            give_verdict(self.policy, self.run, each.id, verifier, result)
        self.policy.changed.notify()
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def place_of():
    async with MemorySwarm() as swarm, swarm.join(TRAINER) as network:
        yield lambda run: Place(run, network)


async def test_by_quorum_a_batch_waits_until_all_its_groups_are_vouched_for(place_of, nursery):
    run = run_of("quorum", quorum=2, verifiers=2)
    place, groups = place_of(run), [group(run, slot, teaches=slot > 0) for slot in range(3)]
    nursery.start_soon(place.ask, groups)
    await trio.testing.wait_all_tasks_blocked()
    await place.give_verdict(groups)
    assert place.let_in is None, "one verifier is no quorum"
    await place.give_verdict(groups[:2], VERIFIERS[1])
    assert place.let_in is None
    await place.give_verdict(groups[2:], VERIFIERS[1])
    assert place.let_in == tuple(groups)
    assert not place.left_out


@pytest.mark.parametrize(("policy", "share"), [("quorum", 1.0), ("sampled", 0.0)])
async def test_what_has_no_word_when_verifiers_fall_silent_is_left_out_by_name(
    policy, share, place_of, nursery, autojump_clock
):
    run = run_of(policy, share=share, verifiers=2)
    place, groups = place_of(run), [group(run, slot, BOB if slot else ANN) for slot in range(3)]
    nursery.start_soon(place.ask, groups)
    await trio.testing.wait_all_tasks_blocked()
    await place.give_verdict(groups[:1])
    await trio.sleep(59)
    await place.give_verdict(groups[1:2])
    assert place.let_in is None, "verdicts still come"
    await trio.sleep(61)
    assert place.let_in == tuple(groups[:2])
    assert place.left_out == {"unverified": 1}
    assert place.receipts._refused == {groups[2].id: "unverified"}


@pytest.mark.parametrize(
    ("vouched", "share", "size"),
    [(0, 0.25, 0), (1, 0.25, 1), (3, 0.25, 4), (2, 0.5, 4), (5, 0.25, 6), (6, 0.25, 8), (1, 0.9, 8)],
)
async def test_what_nobody_vouches_for_is_never_more_than_its_share_of_the_batch_that_is_left(
    vouched, share, size, place_of, nursery, autojump_clock
):
    run = run_of("sampled", share=share)
    place, groups = place_of(run), [group(run, slot) for slot in range(8)]
    nursery.start_soon(place.ask, groups)
    await trio.testing.wait_all_tasks_blocked()
    await place.give_verdict(groups[:vouched])
    await trio.sleep(61)
    assert place.let_in == tuple(groups[:size])
    assert size - vouched <= share * size
    assert place.left_out == Counter(unverified=8 - size)


async def test_a_batch_within_the_share_waits_for_nobody_else(place_of, nursery):
    run = run_of("sampled", share=0.25)
    place, groups = place_of(run), [group(run, slot) for slot in range(8)]
    nursery.start_soon(place.ask, groups)
    await trio.testing.wait_all_tasks_blocked()
    await place.give_verdict(groups[:5])
    assert place.let_in is None
    await place.give_verdict(groups[5:6])
    assert place.let_in == tuple(groups)


async def test_a_group_that_claims_equal_rewards_is_waited_for_like_any_other(place_of, nursery):
    run = run_of("sampled", share=0.0)
    place, groups = place_of(run), [group(run, slot, teaches=False) for slot in range(2)]
    nursery.start_soon(place.ask, groups)
    await trio.testing.wait_all_tasks_blocked()
    assert place.let_in is None
    for each in groups:
        await place.give_verdict([each])
    assert place.let_in == tuple(groups)
    assert not place.left_out


async def test_nobody_waits_for_a_word_on_what_was_passed_over_or_comes_from_the_trusted(place_of):
    run = run_of("sampled", share=0.0)
    place, groups = place_of(run), [group(run, slot) for slot in range(2)]
    passed = [group(run, slot) for slot in range(2, 4)]
    for each in passed:
        place.policy.saw(each.id, each.sampler)
    place.policy.acknowledged([each.id for each in (*passed, *groups)], VERIFIERS[0].public)
    await place.give_verdict(passed[1:])
    await place.ask(passed)
    assert place.let_in == (passed[1],)
    for slot in range(4, 4 + NEWCOMER):
        each = group(run, slot)
        place.policy.saw(each.id, each.sampler)
        await place.give_verdict([each])
    await place.ask(groups)
    assert place.let_in == tuple(groups)


async def test_what_verifiers_speak_against_is_waited_for_no_longer_and_the_rest_is_let_in(place_of, nursery):
    run = run_of("quorum", quorum=2, verifiers=2)
    place = place_of(run)
    bad, muted, good = group(run, 0), group(run, 1), group(run, 0, BOB)
    nursery.start_soon(place.ask, [bad, muted, good])
    await trio.testing.wait_all_tasks_blocked()
    for verifier in VERIFIERS[:2]:
        await place.give_verdict([good], verifier)
        await place.give_verdict([bad], verifier, "dishonest")
    assert place.let_in == (good,)
    assert place.left_out == {"condemned": 1, "muted": 1}


async def test_where_the_trainer_looks_itself_nobody_is_waited_for(place_of):
    run = run_of("self", share=0.5)
    place, groups = place_of(run), [group(run, slot) for slot in range(3)]
    await place.ask(groups)
    assert place.let_in == tuple(groups)


# The whole loop


@pytest.mark.parametrize(("policy", "share"), [("quorum", 0.0), ("sampled", 0.25)])
async def test_a_sequential_run_learns_only_from_what_its_policy_lets_in_and_gets_on(policy, share):
    run = changed_run(
        open_run("sequential", staleness=0, group_size=4),
        verification=Verification(policy=policy, quorum=1, share=share),
        verifiers=(VERIFIERS[0].public,),
    )
    records, vouched_at = Records(), {}

    async def listen(network, ready):
        topic = topics.topic(run.id, topics.VERDICTS)
        async with network.subscribe(topic, lambda _: ACCEPT, capacity=10_000) as inbox:
            ready.set()
            async for message in inbox:
                for envelope in read_batch(message.data):
                    verdict = envelope.open(Verdict, run.id).message
                    vouched_at.setdefault(verdict.group, len(records.steps))

    with closing(engine()) as one, closing(engine()) as two:
        async with MemorySwarm() as swarm, swarm.join(BOB) as network, trio.open_nursery() as nursery:
            ready = trio.Event()
            nursery.start_soon(listen, network, ready)
            await ready.wait()
            nursery.start_soon(lambda: Node(run, VERIFIERS[0], swarm.join).verify(engine=two))
            nursery.start_soon(lambda: Node(run, ANN, swarm.join).sample(slots_per_call=4, engine=one))
            await Node(run, TRAINER, swarm.join).train(3, records=records)
            nursery.cancel_scope.cancel()
    assert len(records.steps) == 3
    for before, record in enumerate(records.steps):
        unverified = [each.id for each in record.groups if vouched_at.get(each.id, 3) > before]
        assert len(unverified) <= share * len(record.groups)
        assert set(record.staleness) == {0}


def engine():
    return make_engine(EngineSpec(ENGINE, embedded.folder(), "cpu", 64, 1))


async def test_a_batch_that_became_smaller_has_less_room_for_a_class_with_a_share(place_of):
    """Of ten groups two are of the class; with four others condemned, only one fits."""
    run = run_of("self", verifiers=2, rough=0.25)
    place = place_of(run)
    groups = [group(run, slot, engine=ROUGH if slot < 2 else ENGINE) for slot in range(6)]
    groups += [group(run, slot, BOB, engine=ENGINE) for slot in range(6, 10)]
    for each in groups:
        place.policy.saw(each.id, each.sampler)
    await place.give_verdict(groups[6:], result="dishonest")
    await place.ask(groups)
    assert place.let_in == (groups[0], *groups[2:6])
    assert place.left_out == {"condemned": 4, "over-share": 1}
