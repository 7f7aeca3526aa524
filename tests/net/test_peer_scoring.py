"""Peer scores: mutes are proportional, spare single slips of good peers, and end."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import trio

from echo_node.net import handler_guard
from echo_node.net.peer_scoring import (
    HALF_LIFE_SECONDS,
    LONGEST_SECONDS,
    PEERS,
    SECONDS_PER_FAULT,
    TOLERATED,
    PeerScores,
)
from tests.net.behaviour import IDENTITIES

PEER, OTHER = (each.public for each in IDENTITIES[:2])


def faults(standing, count, peer=PEER):
    for _ in range(count):
        standing.fault(peer, "bad-signature")


async def test_a_few_faults_mute_nobody_and_one_more_does(autojump_clock):
    standing = PeerScores()
    faults(standing, int(TOLERATED))
    assert not standing.is_muted(PEER)
    assert standing.mutes() == {}
    faults(standing, 1)
    assert standing.is_muted(PEER)
    assert standing.mutes()[PEER].reasons == {"bad-signature": 9}
    assert not standing.is_muted(OTHER)


async def test_the_more_faults_the_longer_up_to_a_bound(autojump_clock):
    lengths = []
    for count in (9, 90, 100_000):
        standing = PeerScores()
        faults(standing, count)
        lengths.append(standing.mutes()[PEER].seconds)
    assert lengths == [9 * SECONDS_PER_FAULT, 90 * SECONDS_PER_FAULT, LONGEST_SECONDS]


async def test_a_forwarder_of_much_that_is_good_is_never_muted_for_a_few_that_were_bad(autojump_clock):
    standing = PeerScores()
    for n in range(20_000):
        standing.credit(PEER)
        if n % 100 == 99:
            standing.fault(PEER, "bad-signature")
        await trio.sleep(0.01)
        assert not standing.is_muted(PEER)
    assert standing.scores() == {PEER: {"bad-signature": 200}}


async def test_a_burst_of_bad_after_much_good_is_weighed_against_it(autojump_clock):
    standing = PeerScores()
    for _ in range(3_000):
        standing.credit(PEER)
    faults(standing, 900)
    assert not standing.is_muted(PEER)
    faults(standing, 200)
    assert standing.is_muted(PEER), "more than a quarter of all was bad"


async def test_good_that_was_long_ago_buys_nothing_now(autojump_clock):
    standing = PeerScores()
    for _ in range(3_000):
        standing.credit(PEER)
    await trio.sleep(20 * HALF_LIFE_SECONDS)
    faults(standing, 9)
    assert standing.is_muted(PEER)


async def test_faults_fade_and_a_mute_ends(autojump_clock):
    standing = PeerScores()
    faults(standing, 10)
    await trio.sleep(10 * SECONDS_PER_FAULT + 1)
    assert not standing.is_muted(PEER)
    assert standing.mutes() == {}
    await trio.sleep(10 * HALF_LIFE_SECONDS)
    faults(standing, int(TOLERATED) - 1)
    assert not standing.is_muted(PEER)


async def test_the_by_peer_are_bounded_and_who_is_muted_keeps_its_own(autojump_clock, monkeypatch):
    monkeypatch.setattr(handler_guard, "PEERS", 100)
    monkeypatch.setattr("echo_node.net.peer_scoring.PEERS", 100)
    standing = PeerScores()
    faults(standing, 1_000)
    for n in range(1_000):
        standing.credit(n.to_bytes(32))
        standing.fault(n.to_bytes(32), "stale")
        await trio.sleep(0.001)
    assert len(standing._by_peer) <= 100
    assert len(standing.scores()) <= 100
    assert standing.is_muted(PEER)


def test_there_is_room_for_more_peers_than_can_be_connected():
    assert PEERS > 1_000
