"""The network in one process: its partitions, its bounds, and how it ends."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.errors import ConfigError, DefectError
from echo_node.net import dedup, handler_guard, memory_node
from echo_node.net.base import PeerEvent, RequestError
from echo_node.net.memory import MemorySwarm
from tests.net.behaviour import IDENTITIES, KEY, STREAM, TOPIC, accept

ONE, TWO, THREE, FOUR, _ = IDENTITIES


async def echo(_peer, data):
    await trio.lowlevel.checkpoint()
    return data


async def test_a_partition_cuts_everything_across_and_nothing_within(autojump_clock):
    async with (
        MemorySwarm() as swarm,
        swarm.join(ONE) as one,
        swarm.join(TWO) as two,
        swarm.join(THREE) as three,
        swarm.join(FOUR) as four,
        three.subscribe(TOPIC, accept) as across,
        two.subscribe(TOPIC, accept) as within,
        one.watch() as events,
    ):
        await three.provide(KEY)
        swarm.partition([ONE.public, TWO.public])
        assert one.peers() == {two.public}
        assert three.peers() == {four.public}  # who is not named is together
        assert {await events.receive(), await events.receive()} == {
            PeerEvent(three.public, joined=False),
            PeerEvent(four.public, joined=False),
        }
        await one.publish(TOPIC, b"cut")
        assert (await within.receive()).data == b"cut"
        assert await one.find(KEY, 1) == []
        with three.serve(STREAM, echo, most=1):
            with pytest.raises(RequestError, match="partition") as caught:
                await one.request(three.public, STREAM, b"", deadline=1, most=1)
            assert caught.value.reason == "unreachable"
            assert await four.request(three.public, STREAM, b"", deadline=1, most=1) == b""
            swarm.heal()
            assert await one.request(three.public, STREAM, b"", deadline=1, most=1) == b""
        assert (await events.receive()).joined
        assert await one.find(KEY, 1) == [three.public]
        await one.publish(TOPIC, b"healed")
        assert (await across.receive()).data == b"healed"
        assert swarm.counts()["cut"] == 1


async def test_a_partition_breaks_pending_requests_and_loses_what_is_under_way(autojump_clock):
    broken = trio.Event()

    async def ask(network):
        with pytest.raises(RequestError) as caught:
            await network.request(TWO.public, STREAM, b"", deadline=100, most=1)
        assert caught.value.reason == "unreachable"
        assert trio.current_time() < 10
        broken.set()

    async with (
        MemorySwarm(delay=(1.0, 1.0)) as swarm,
        swarm.join(ONE) as one,
        swarm.join(TWO) as two,
        two.subscribe(TOPIC, accept) as inbox,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, one)
        await one.publish(TOPIC, b"under way")
        await trio.sleep(0.5)
        swarm.partition([one.public], [two.public])
        await broken.wait()
        await trio.sleep(5)
        swarm.heal()
        await one.publish(TOPIC, b"after")
        assert (await inbox.receive()).data == b"after"
    assert swarm.counts()["cut"] == 1


async def test_nobody_is_on_two_sides():
    async with MemorySwarm() as swarm, swarm.join(ONE):
        with pytest.raises(ConfigError, match="two sides"):
            swarm.partition([ONE.public], [ONE.public, TWO.public])


async def test_one_key_is_one_node_and_a_swarm_must_be_open():
    async with MemorySwarm() as swarm, swarm.join(ONE):
        with pytest.raises(ConfigError, match="already"):
            async with swarm.join(ONE):
                pass
    with pytest.raises(DefectError, match="not open"):
        async with swarm.join(TWO):
            pass


async def test_an_error_in_the_block_leaves_the_swarm_unwrapped():
    async def fail():
        async with MemorySwarm() as swarm, swarm.join(ONE):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()


async def test_a_cancelled_swarm_leaves_quietly():
    with trio.move_on_after(0.01) as scope:
        async with (
            MemorySwarm(delay=(9.0, 9.0)) as swarm,
            swarm.join(ONE) as one,
            swarm.join(TWO) as two,
            two.subscribe(TOPIC, accept) as inbox,
        ):
            await one.publish(TOPIC, b"x")
            await inbox.receive()
    assert scope.cancelled_caught


async def test_a_handler_that_fails_while_it_is_cancelled_does_not_end_the_swarm():
    async def stubborn(_peer, _data):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("while being told to stop")

    async with MemorySwarm() as swarm, swarm.join(ONE) as one, swarm.join(TWO) as two:
        with two.serve(STREAM, stubborn, most=1), pytest.raises(RequestError):
            await one.request(two.public, STREAM, b"", deadline=0.01, most=1)
        await trio.testing.wait_all_tasks_blocked()
        with two.serve(STREAM, echo, most=1):
            assert await one.request(two.public, STREAM, b"a", deadline=5, most=1) == b"a"
    assert two.counts()["contained"] == 1


async def test_a_node_takes_a_bounded_number_of_questions(monkeypatch):
    monkeypatch.setattr(memory_node, "HANDLERS", 2)
    reasons = []

    async def hold(_peer, _data):
        await trio.sleep_forever()

    async def ask(network):
        with pytest.raises(RequestError) as caught:
            await network.request(TWO.public, STREAM, b"", deadline=5, most=1)
        reasons.append(caught.value.reason)

    async with (
        MemorySwarm() as swarm,
        swarm.join(ONE) as one,
        swarm.join(TWO) as two,
        trio.open_nursery() as nursery,
    ):
        with two.serve(STREAM, hold, most=1):
            for _ in range(3):
                nursery.start_soon(ask, one)
            await trio.testing.wait_all_tasks_blocked()
            assert reasons == ["busy"]
    assert reasons == ["busy", "no-handler", "no-handler"]


async def test_what_was_seen_is_forgotten_by_time_and_by_number(autojump_clock, monkeypatch):
    monkeypatch.setattr(dedup, "MESSAGES", 3)
    known = dedup.DuplicateFilter()
    for message in (b"a", b"b", b"c", b"d"):
        known.add(message)
    assert [message in known for message in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    await trio.sleep(dedup.SECONDS / 2)
    known.add(b"b")
    await trio.sleep(dedup.SECONDS / 2)
    assert [message in known for message in (b"b", b"c", b"d")] == [True, False, False]


def test_faults_are_bounded_and_the_worst_are_kept(monkeypatch):
    monkeypatch.setattr(handler_guard, "PEERS", 2)
    monkeypatch.setattr(handler_guard, "REASONS", 3)
    faults = handler_guard.Faults()
    for reason in ("a", "b", "c", "d", "a"):
        faults.score(b"bad", reason)
    faults.score(b"once", "a")
    faults.score(b"new", "a")
    assert faults.scores() == {b"bad": {"a": 2, "b": 1, handler_guard.OTHER: 2}, b"new": {"a": 1}}
