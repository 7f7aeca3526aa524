"""Whole swarms of real processes over loopback."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
import trio

from protocol import Identity
from tests.net.behaviour import KEY, STREAM
from tests.net.processes import start_nodes, start_process

NODES = 8
PER_SECOND = 20
"""Messages of all nodes together."""
SETTLE_SECONDS = 10.0
GATHER_SECONDS = 90.0
"""In which thirty nodes find each other, on two cores."""
COLD_SECONDS = 10.0
"""From the start of the process, its imports included."""


async def test_processes_gossip_ask_and_find_and_see_one_die():
    async with start_nodes(3) as (one, two, three):
        for node in (one, two, three):
            await node.ask("subscribe")
        await hear_each_other((one, two, three))
        await two.ask("publish", data=b"from two".hex())
        await three.ask("publish", data=b"from three".hex())
        for node, others in ((one, 2), (two, 1), (three, 1)):  # nobody hears itself
            arrived = await node.until("arrived", lambda got, others=others: len(got) == others)
            assert {bytes.fromhex(data) for _, data, _ in arrived} <= {b"from two", b"from three"}

        await one.ask("serve_echo", stream=STREAM)
        assert await three.ask("request", peer=one.public, stream=STREAM, data="abcd") == "abcd"
        await two.ask("serve_echo", stream=STREAM)
        assert await three.ask("request", peer=two.public, stream=STREAM, data="ef") == "ef", (
            "a peer that it never met"
        )

        await two.ask("provide", key=KEY.hex())
        assert (await three.ask("find", key=KEY.hex()))["found"] == [two.public]

        two.process.signal(signal.SIGKILL)
        await one.until("peers", lambda peers: two.public not in peers)
        await three.until("peers", lambda peers: two.public not in peers)
        assert (await three.ask("find", key=KEY.hex()))["found"] == []
        await three.ask("publish", data=b"after".hex())
        await one.until("arrived", lambda got: got[-1][1] == b"after".hex())


async def test_eight_nodes_lose_no_message():
    await gossip_without_loss(seconds=12)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_eight_nodes_lose_no_message_in_a_minute():
    await gossip_without_loss(seconds=60)


async def gossip_without_loss(seconds):
    """Every node publishes signed messages by the clock, and gets all of the others', each once."""
    interval, count = NODES / PER_SECOND, seconds * PER_SECOND // NODES
    async with start_nodes(NODES) as nodes:
        for node in nodes:
            await node.ask("subscribe", sealed=True)
        await hear_each_other(nodes)
        start = time.monotonic() + 0.5
        async with trio.open_nursery() as nursery:
            for n, node in enumerate(nodes):
                nursery.start_soon(flow, node, start + n * interval / NODES, interval, count, seconds)
        for node in nodes:
            expected = Counter(
                (other.public, n) for other in nodes if other is not node for n in range(count)
            )
            enough = expected.total()
            got = await node.until(
                "arrived", lambda got, enough=enough: len(got) >= enough, within=SETTLE_SECONDS
            )
            assert Counter((signer, n) for signer, n, _ in got) == expected
            assert await node.ask("scores") == {}


async def hear_each_other(nodes):
    """All have found all, and know what they listen to."""
    for node in nodes:
        await node.until("subscribers", lambda count: count == len(nodes) - 1, within=GATHER_SECONDS)


async def gather(nodes):
    """All have found many, and the first rush is over."""
    seen, now = None, []
    with trio.fail_after(GATHER_SECONDS):
        while seen != now or min(map(len, now)) < 8:
            await trio.sleep(3)
            seen, now = now, [await node.ask("peers") for node in nodes]


async def flow(node, start, interval, count, seconds):
    sent = await node.ask(
        "flow", start=start, interval=interval, count=count, within=seconds + SETTLE_SECONDS
    )
    assert len(sent) == count


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_cold_node_knows_a_swarm_of_thirty_and_finds_a_provider_within_ten_seconds():
    async with start_nodes(30, per_process=6) as nodes:
        await gather(nodes)
        await nodes[17].ask("provide", key=KEY.hex())
        began = time.monotonic()
        async with start_process([Identity(b"c" * 32)], [nodes[0].addresses[0]]) as process:
            (node,) = process.places
            greeted = time.monotonic() - began
            await node.until("known", lambda known: len(known) >= 8)
            await node.until(
                "find", lambda answer: nodes[17].public in answer["found"], key=KEY.hex(), count=1
            )
            assert time.monotonic() - began < COLD_SECONDS, f"{greeted:.1f} s of it to start"


async def test_a_node_that_was_stopped_for_a_while_goes_on():
    async with start_nodes(4) as nodes:
        one, two, three, four = nodes
        for node in nodes:
            await node.ask("subscribe")
        await hear_each_other(nodes)
        three.process.signal(signal.SIGSTOP)
        for n in range(20):
            await four.ask("publish", data=f"{n:02x}")
            await trio.sleep(0.1)
        await two.until("arrived", lambda got: len(got) == 20)
        three.process.signal(signal.SIGCONT)
        await three.until("arrived", lambda got: len(got) == 20)
        await three.ask("publish", data=b"awake".hex())
        for node in (one, two, four):
            await node.until("arrived", lambda got: got[-1][1] == b"awake".hex())
