"""The weather of the network in one process: what it does, and that a seed fixes it."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing

from echo_node.errors import ConfigError
from echo_node.net import link_faults
from echo_node.net.base import RequestError
from echo_node.net.link_faults import LinkFaults
from echo_node.net.memory import MemorySwarm
from tests.net.behaviour import IDENTITIES, KEY, STREAM, TOPIC, accept

ONE, TWO, THREE, *_ = IDENTITIES
DATA = [b"%03d" % n for n in range(200)]


async def echo(_peer, data):
    await trio.lowlevel.checkpoint()
    return data


async def arrivals(swarm, data=DATA, *, gap=0.0):
    """What the second of two nodes gets of the first one's gossip, with times."""
    got = []

    async def read(inbox):
        got.extend([(round(trio.current_time() - start, 6), message.data) async for message in inbox])

    async with (
        swarm,
        swarm.join(ONE) as one,
        swarm.join(TWO) as two,
        trio.open_nursery() as nursery,
        two.subscribe(TOPIC, accept, capacity=1000) as inbox,
    ):
        nursery.start_soon(read, inbox)
        start = trio.current_time()
        for item in data:
            await one.publish(TOPIC, item)
            await trio.sleep(gap)
        await trio.sleep(60)
    return got


async def test_in_fair_weather_everything_arrives_in_order(autojump_clock):
    swarm = MemorySwarm()
    assert [data for _, data in await arrivals(swarm)] == DATA
    assert swarm.counts()["sent"] == len(DATA)
    assert swarm.gossip_bytes == 3 * len(DATA)


async def test_loss_loses_its_share_and_counts_it(autojump_clock):
    swarm = MemorySwarm(seed=1, loss=0.3)
    got = [data for _, data in await arrivals(swarm)]
    assert 100 < len(got) < 180
    assert got == sorted(got)
    assert swarm.counts()["lost"] == len(DATA) - len(got)
    assert await arrivals(MemorySwarm(loss=1.0)) == []


async def test_delay_is_within_its_bounds_and_keeps_the_order(autojump_clock):
    got = await arrivals(MemorySwarm(seed=1, delay=(0.5, 2.0)), gap=8.0)
    waits = [when - 8.0 * n for n, (when, _) in enumerate(got)]
    assert 0.5 <= min(waits) < 0.6
    assert 1.9 < max(waits) <= 2.0
    got = await arrivals(MemorySwarm(seed=1, delay=(0.5, 2.0)), gap=0.1)
    assert [data for _, data in got] == DATA


async def test_duplication_delivers_again_what_was_delivered(autojump_clock):
    swarm = MemorySwarm(seed=1, duplicate=0.25)
    got = [data for _, data in await arrivals(swarm)]
    assert set(got) == set(DATA)
    assert len(got) - len(DATA) == swarm.counts()["doubled"]
    assert 30 < len(got) - len(DATA) < 70
    assert swarm.gossip_bytes == 3 * len(got)


async def test_reordering_lets_later_messages_overtake_and_loses_none(autojump_clock):
    swarm = MemorySwarm(seed=1, reorder=0.2)
    got = [data for _, data in await arrivals(swarm, gap=0.001)]
    assert sorted(got) == DATA
    overtaken = sum(later < earlier for earlier, later in itertools.pairwise(got))
    assert swarm.counts()["reordered"] > 20
    assert overtaken > 10


async def test_a_seed_fixes_what_happens_and_another_seed_changes_it(autojump_clock):
    def rough(seed):
        return MemorySwarm(seed, loss=0.2, delay=(0.01, 0.3), duplicate=0.1, reorder=0.1)

    first = await arrivals(rough(7), gap=0.01)
    assert await arrivals(rough(7), gap=0.01) == first
    assert await arrivals(rough(8), gap=0.01) != first


async def test_the_luck_of_a_link_does_not_hang_on_the_other_links(autojump_clock):
    async def what_two_gets(*, crowded):
        async with (
            MemorySwarm(3, loss=0.5) as swarm,
            swarm.join(THREE) as three,
            swarm.join(ONE) as one,
            swarm.join(TWO) as two,
            two.subscribe(TOPIC, accept) as inbox,
            three.subscribe(TOPIC if crowded else "/elsewhere", accept),
        ):
            for item in DATA:
                await one.publish(TOPIC, item)
                if crowded:
                    await two.publish(TOPIC, b"of two " + item)
            await trio.testing.wait_all_tasks_blocked()
            return [(await inbox.receive()).data for _ in range(len(inbox))]

    alone = await what_two_gets(crowded=False)
    assert alone
    assert alone == await what_two_gets(crowded=True)


async def test_the_weather_can_change(autojump_clock):
    async with (
        MemorySwarm(loss=1.0) as swarm,
        swarm.join(ONE) as one,
        swarm.join(TWO) as two,
        two.subscribe(TOPIC, accept) as inbox,
    ):
        await one.publish(TOPIC, b"in the storm")
        swarm.faults = LinkFaults()
        await one.publish(TOPIC, b"after it")
        assert (await inbox.receive()).data == b"after it"


@pytest.mark.parametrize(
    "knobs",
    [
        {"loss": 1.1},
        {"duplicate": -0.1},
        {"reorder": float("nan")},
        {"delay": (2.0, 1.0)},
        {"delay": (-1, 1)},
    ],
)
def test_impossible_weather_is_refused_by_name(knobs):
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        MemorySwarm(**knobs)


async def test_requests_are_delayed_and_never_lost(autojump_clock):
    bad = MemorySwarm(loss=1.0, duplicate=1.0, reorder=1.0, delay=(1.0, 1.0))
    async with bad as swarm, swarm.join(ONE) as one, swarm.join(TWO) as two:
        with two.serve(STREAM, echo, most=10):
            start = trio.current_time()
            assert await one.request(two.public, STREAM, b"a", deadline=5, most=10) == b"a"
            assert trio.current_time() - start == pytest.approx(2.0)
            with pytest.raises(RequestError) as caught:
                await one.request(two.public, STREAM, b"a", deadline=1.5, most=10)
            assert caught.value.reason == "deadline"


async def test_a_look_up_that_takes_too_long_finds_nothing(autojump_clock):
    async with MemorySwarm(delay=(3.0, 3.0)) as swarm, swarm.join(ONE) as one, swarm.join(TWO) as two:
        await two.provide(KEY)
        assert await one.find(KEY, 1, deadline=1.0) == []
        assert await one.find(KEY, 1) == [two.public]


async def test_what_is_under_way_is_bounded(autojump_clock, monkeypatch):
    monkeypatch.setattr("echo_node.net.memory.IN_FLIGHT", 5)
    swarm = MemorySwarm(delay=(1.0, 1.0))
    assert [data for _, data in await arrivals(swarm, DATA[:8])] == DATA[:5]
    assert swarm.counts()["overflow"] == 3


def test_a_held_message_is_held_longer_than_any_other_takes():
    link = link_faults.Link(0, ONE.public, TWO.public)
    held = link.transmit(LinkFaults(reorder=1.0, delay=(1.0, 1.0)), 10.0)
    assert (held.due, held.reordered) == ((12.0,), True)
