"""Limits on bytes per second: long-run rate, fairness of waiting, and the cost of cancelling."""

from __future__ import annotations

import pytest
import trio

from echo_node.errors import ConfigError
from echo_node.net import rate_limit
from echo_node.net.rate_limit import BURST_SECONDS, Throttle, TokenBucket, UploadLimit
from tests.net.blob_nodes import MIB

ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


async def test_what_passes_in_the_long_run_is_the_rate(autojump_clock):
    throttle = Throttle(1_000)
    await trio.sleep(100)
    start = autojump_clock.current_time()
    for count in (10, 5_000, 1, 1_989, 3_000):
        await throttle.take(count)
    assert autojump_clock.current_time() - start == pytest.approx(10 - BURST_SECONDS)


async def test_a_pause_saves_up_a_moment_and_no_more(autojump_clock):
    throttle = Throttle(1_000)
    await throttle.take(1_000)
    await trio.sleep(10_000)
    start = autojump_clock.current_time()
    await throttle.take(int(1_000 * BURST_SECONDS))
    assert autojump_clock.current_time() == start
    await throttle.take(1_000)
    assert autojump_clock.current_time() == pytest.approx(start + 1)


async def test_without_a_rate_nobody_waits(autojump_clock):
    throttle = Throttle()
    for _ in range(100):
        await throttle.take(10**12)
    assert autojump_clock.current_time() == 0


async def test_who_gives_up_gives_back_what_it_had_taken(autojump_clock):
    throttle = Throttle(1_000)
    await throttle.take(250)
    start = autojump_clock.current_time()
    for _ in range(50):
        with trio.move_on_after(0.001):
            await throttle.take(10_000_000)
    await throttle.take(1_000)
    assert autojump_clock.current_time() - start == pytest.approx(1)


async def test_those_who_wait_are_served_in_their_order(autojump_clock):
    throttle, served = Throttle(100), []

    async def take(name):
        await throttle.take(100)
        served.append((name, round(autojump_clock.current_time(), 3)))

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(take, name)
            await trio.sleep(0.001)
    assert served == [("a", 0.75), ("b", 1.75), ("c", 2.75)]


async def test_each_peer_has_its_share_and_all_together_the_total(autojump_clock):
    uplink = UploadLimit(total=1_500 * MIB, each=1_000 * MIB)
    done = {}

    async def take(peer):
        for _ in range(10):
            await uplink.take(peer, 1_000 * MIB)
        done[peer] = autojump_clock.current_time()

    await take(ONE)
    assert 10 - BURST_SECONDS <= done[ONE] <= 15, "one alone goes at its own limit, or nearly"
    start = autojump_clock.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, ONE)
        nursery.start_soon(take, TWO)
    assert autojump_clock.current_time() - start == pytest.approx(20_000 / 1_500, abs=1.5)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_the_persons_mistake(rate):
    with pytest.raises(ConfigError, match="bytes a second"):
        Throttle(rate)


async def test_a_bucket_is_spent_while_its_balance_is_positive_and_not_below(autojump_clock):  # noqa: ARG001 - it jumps
    bucket = TokenBucket(2.0, 2.0)
    assert [bucket.spend() for _ in range(3)] == [True, True, False], "all that is in it, and no debt"
    await trio.sleep(0.25)
    assert bucket.spend(), "half a token is positive"
    await trio.sleep(0.25)
    assert not bucket.spend(), "what was overdrawn is paid first"


async def test_of_more_peers_than_are_remembered_the_least_recent_is_forgotten(autojump_clock, monkeypatch):
    monkeypatch.setattr(rate_limit, "PEERS", 2)
    uplink = UploadLimit(each=1_000)

    async def seconds(peer, count):
        start = autojump_clock.current_time()
        await uplink.take(peer, count)
        return autojump_clock.current_time() - start

    assert await seconds(ONE, 2_000) > 1
    assert await seconds(TWO, 1) == 0
    assert await seconds(ONE, 100) == pytest.approx(0.1), "it is remembered, with nothing left"
    for peer in (TWO, THREE):
        assert await seconds(peer, 1) == 0
    assert await seconds(ONE, 100) == 0, "it begins anew"
