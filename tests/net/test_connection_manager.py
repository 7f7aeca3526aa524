"""Inbound places: caps per network, protected peers, and who leaves when all are taken."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net import swarm as swarm_module
from echo_node.net.connection_manager import (
    NEWCOMERS_SHARE,
    PER_KEY,
    PER_RELAY,
    STAY_SECONDS,
    ConnectionManager,
    Rank,
    networks_of,
)
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm import BROKEN, id_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity
from tests.net.behaviour import until
from tests.net.hostile import SOON

VICTIM = Identity(b"v" * 32)
BOUND = 30
"""Connections of the victim; 25 of them are inbound."""


class Places:
    """A connection manager with a clock of its own."""

    def __init__(self, inbound=8, **settings):
        self.now = 100.0
        self.useful: dict[bytes, float] = {}
        self.manager = ConnectionManager(
            inbound, lambda: self.now, lambda peer: self.useful.get(peer, -math.inf), **settings
        )
        self.there: dict[int, tuple[bytes, str | None]] = {}
        self._next = 0

    def come(self, host, key=None, relay="", wait=0.0):
        """Let a peer come; return its number, or None if it got no place."""
        self.now += wait
        self._next += 1
        number, key = self._next, key or self._next.to_bytes(32)
        ended = self.manager.admit(key, networks_of(host, relay), number)
        if ended is None:
            return None
        for each in ended:
            del self.there[each]
        self.there[number] = (key, host)
        return number

    def hosts(self):
        return sorted(host or "relay" for _, host in self.there.values())


def test_the_idlest_of_the_most_crowded_address_goes():
    places = Places(inbound=8)
    honest = [places.come(f"203.0.113.{n}", wait=1) for n in range(3)]
    crowd = [places.come("198.51.100.1", wait=1) for _ in range(5)]
    places.useful[places.there[crowd[0]][0]] = places.now
    places.now += STAY_SECONDS
    new = places.come("192.0.2.1")
    assert new is not None
    assert crowd[1] not in places.there, "the oldest of the crowd that sent nothing of use"
    assert all(each in places.there for each in (*honest, crowd[0], new))


def test_nobody_displaces_a_network_with_fewer_connections_than_its_own():
    places = Places(inbound=8)
    honest = [places.come(f"203.0.113.{n}") for n in range(4)]
    for _ in range(200):
        places.come("198.51.100.1", wait=STAY_SECONDS)
        assert all(each in places.there for each in honest)


def test_pings_are_of_no_use_and_make_nobody_less_idle():
    places = Places(inbound=2)
    first, second = (places.come("198.51.100.1", wait=1) for _ in range(2))
    places.useful[places.there[second][0]] = places.now
    assert places.come("203.0.113.9", wait=STAY_SECONDS) is not None
    assert first not in places.there
    assert second in places.there


def test_a_rush_does_not_thrash():
    places = Places(inbound=4)
    came = [places.come("198.51.100.1") for _ in range(40)]
    assert sum(each is not None for each in came) == 4
    assert places.come("198.51.100.1", wait=STAY_SECONDS) is not None


def test_an_address_has_a_cap_and_its_own_idlest_makes_room():
    places = Places(inbound=100, per_address=5)
    first = [places.come("203.0.113.1", wait=1) for _ in range(5)]
    assert places.come("203.0.113.1", wait=STAY_SECONDS) is not None
    assert first[0] not in places.there
    assert len(places.there) == 5
    assert places.come("203.0.113.2") is not None


@pytest.mark.parametrize(
    ("hosts", "most"),
    [
        ([f"2a00:1:2:3::{n:x}" for n in range(1, 40)], 5),  # one /64
        ([f"2a00:1:2:{n:x}::1" for n in range(40)], 10),  # one /56
        ([f"2a00:1:2:{n:x}00::1" for n in range(40)], 20),  # one /48
        ([f"2a00:1:{n:x}::1" for n in range(40)], 40),  # many sites
        (["::ffff:203.0.113.7"] * 40, 5),
    ],
    ids=["a /64", "a /56", "a /48", "many sites", "mapped"],
)
def test_ipv6_counts_at_the_size_of_networks_that_one_owner_has(hosts, most):
    places = Places(inbound=1_000, per_address=5)
    for host in hosts:
        places.come(host)
    assert len(places.there) == most


def test_loopback_has_no_cap_and_is_a_crowd_all_the_same():
    places = Places(inbound=20, per_address=3)
    for _ in range(20):
        assert places.come("127.0.0.1") is not None
    assert places.come("203.0.113.1", wait=STAY_SECONDS) is not None
    assert places.hosts().count("127.0.0.1") == 19


def test_peers_through_a_relay_count_for_the_relay_and_not_for_its_address():
    places = Places(inbound=200, per_address=2)
    for _ in range(PER_RELAY + 10):
        places.come(None, relay="R")
    assert places.hosts().count("relay") == PER_RELAY
    assert places.come(None, relay="S") is not None
    assert places.come("203.0.113.1") is not None


def test_one_key_holds_few_places():
    places = Places(inbound=50)
    for n in range(10):
        assert places.come(f"203.0.113.{n}", key=b"k" * 32) is not None
    assert len(places.there) == PER_KEY


def test_keys_of_the_manifest_always_get_a_place_and_keep_it():
    places = Places(inbound=4)
    for n in range(4):
        key = n.to_bytes(32, "little")
        places.manager.protect(key, 600)
        assert places.come("203.0.113.1", key=key) is not None
    trainers = [bytes([200 + n]) * 32 for n in range(4)]
    for key in trainers:
        places.manager.protect(key, math.inf)
        assert places.come("203.0.113.1", key=key) is not None, "at once, and in place of members"
    assert {key for key, _ in places.there.values()} == set(trainers)
    assert places.come("198.51.100.1", wait=60) is None


def test_members_are_exempt_from_caps_and_never_make_room_for_strangers():
    places = Places(inbound=16, per_address=2)
    members = [bytes([n]) * 32 for n in range(1, 11)]
    for key in members:
        places.manager.protect(key, 10_000)
        assert places.come("203.0.113.1", key=key) is not None
    for n in range(100):
        places.come(f"198.51.100.{n}", wait=STAY_SECONDS)
    assert set(members) <= {key for key, _ in places.there.values()}


def test_members_leave_some_places_to_newcomers():
    inbound = 16
    places = Places(inbound=inbound)
    for n in range(1, 40):
        places.manager.protect(bytes([n]) * 32, 10_000)
        places.come(f"203.0.113.{n}", key=bytes([n]) * 32, wait=STAY_SECONDS)
    assert places.come("198.51.100.1", wait=STAY_SECONDS) is not None
    members = sum(places.manager.rank(key) is Rank.MEMBER for key, _ in places.there.values())
    assert members >= inbound - inbound // NEWCOMERS_SHARE - 1


def test_protection_ends_and_a_shorter_one_does_not_cut_a_longer():
    places = Places()
    places.manager.protect(b"m" * 32, 100)
    places.manager.protect(b"m" * 32, 1)
    assert places.manager.rank(b"m" * 32) is Rank.MEMBER
    places.now += 101
    assert places.manager.rank(b"m" * 32) is Rank.STRANGER


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0, 20), st.booleans()), max_size=150),
    st.integers(1, 12),
)
def test_whoever_comes_the_bounds_hold_and_a_key_of_the_manifest_stays(arrivals, inbound):
    places = Places(inbound=inbound, per_address=4)
    trainer = b"t" * 32
    places.manager.protect(trainer, math.inf)
    held = places.come("203.0.113.200", key=trainer)
    protected_once: dict[bytes, bool] = {}
    for n, (host, member, wait, useful) in enumerate(arrivals):
        key = bytes([member]) * 32 if member else (1_000 + n).to_bytes(32)
        if member == 1:
            places.manager.protect(key, 30)
            protected_once[key] = True
        before = len(places.there)
        came = places.come(f"203.0.113.{host}", key=key, wait=wait)
        if useful:
            places.useful[key] = places.now
        assert len(places.there) == len(places.manager) <= inbound
        assert held in places.there
        assert came is not None or len(places.there) == before
        crowd = Counter(
            where for other, where in places.there.values() if places.manager.rank(other) is Rank.STRANGER
        )
        protected = sum(
            protected_once.get(other, False) for other, _ in places.there.values()
        )  # whose protection ended stay where they are
        assert max(crowd.values(), default=0) <= 4 + protected


# over real sockets


async def connected(victim, host, identity):
    """Connect a bare host to the victim; return whether it is still there a moment later."""
    with suppress(*BROKEN), trio.move_on_after(SOON):
        await host.connect(PeerInfo(id_of(VICTIM.public), [Multiaddr(victim.addresses[0])]))
        await trio.sleep(0.2)
        return identity.public in victim.peers()
    return False


async def come_in(stack, victim, number):
    identity = Identity(number.to_bytes(32))
    host = build_host(identity)
    await stack.enter_async_context(running(host, []))
    return identity, host, await connected(victim, host, identity)


async def test_twenty_five_idle_keys_keep_no_newcomer_out_and_no_member_is_sent_away():
    settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), connections=BOUND, public=True)
    async with join_swarm(VICTIM, settings) as victim, AsyncExitStack() as stack:
        member, verifier = Identity(b"m" * 32), Identity(b"j" * 32)
        victim.protect(member.public)
        victim.protect(verifier.public, math.inf)
        at_work = build_host(member)
        await stack.enter_async_context(running(at_work, []))
        assert await connected(victim, at_work, member)
        for n in range(25):
            await come_in(stack, victim, 1_000 + n)
        await until(lambda: len(victim.host.swarm.places) == 25)
        began = trio.current_time()
        for n in range(3):
            while not (await come_in(stack, victim, 2_000 + n))[2]:
                assert trio.current_time() - began < SOON
        assert trio.current_time() - began < SOON
        judge = build_host(verifier)
        await stack.enter_async_context(running(judge, []))
        assert await connected(victim, judge, verifier), "at once"
        for n in range(15):  # the crowd comes again and again
            await come_in(stack, victim, 3_000 + n)
        assert {member.public, verifier.public} <= victim.peers()
        assert len(victim.host.swarm.places) <= 25
        assert len(victim.host.swarm.get_connections()) <= BOUND


async def test_who_sends_something_of_use_stays_while_idle_ones_of_its_address_go():
    settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), connections=12, public=True)
    async with join_swarm(VICTIM, settings) as victim, AsyncExitStack() as stack:
        useful, _, _ = await come_in(stack, victim, 1)
        for n in range(9):
            await come_in(stack, victim, 100 + n)
        await until(lambda: len(victim.host.swarm.places) == 10)
        await trio.sleep(STAY_SECONDS)
        victim.host.scores.credit(useful.public)
        for n in range(4):
            assert (await come_in(stack, victim, 200 + n))[2]
        assert useful.public in victim.peers()


async def test_a_place_is_free_again_when_its_connection_ends():
    settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), connections=12, public=True)
    async with join_swarm(VICTIM, settings) as victim:
        for n in range(30):
            async with AsyncExitStack() as stack:
                assert (await come_in(stack, victim, 100 + n))[2]
            await until(lambda: not len(victim.host.swarm.places))


async def test_handshakes_of_one_address_are_few_and_those_of_others_go_on(monkeypatch):
    """Slow handshakes from one address end each other, not those of another."""
    monkeypatch.setattr(swarm_module.multiaddrs, "ip", _as_if_public)
    settings = SwarmSettings(listen=("/ip4/0.0.0.0/tcp/0",), public=True)
    async with join_swarm(VICTIM, settings) as victim:
        port = int(victim.host.get_transport_addrs()[0].value_for_protocol("tcp"))
        swarm = victim.host.swarm
        async with AsyncExitStack() as stack:
            for n in range(60):
                slow = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
                await stack.enter_async_context(slow)
                await slow.send_all(b"\x13"[: n % 2])
            await until(lambda: len(swarm._handshakes) == swarm_module.PENDING_EACH)
            host = build_host(Identity(b"n" * 32))
            async with running(host, []):
                await host.connect(PeerInfo(id_of(VICTIM.public), [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")]))
                await until(lambda: Identity(b"n" * 32).public in victim.peers())


async def test_a_network_that_comes_and_goes_without_end_is_slowed_down(monkeypatch):
    monkeypatch.setattr(swarm_module.multiaddrs, "ip", _as_if_public)
    monkeypatch.setattr(swarm_module, "HANDSHAKES_BURST", 10)
    monkeypatch.setattr(swarm_module, "HANDSHAKES_PER_SECOND", 0.01)
    settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), public=True)
    async with join_swarm(VICTIM, settings) as victim:
        came = 0
        for n in range(14):
            async with AsyncExitStack() as stack:
                came += (await come_in(stack, victim, 100 + n))[2]
        assert came <= 11


_ip = swarm_module.multiaddrs.ip


def _as_if_public(text):
    """Loopback aliases as addresses of the internet: 127.0.0.2 is 203.0.114.2."""
    found = _ip(text)
    return _ip(text.replace("127.0.0.", "203.0.114.")) if found and found.is_loopback else found
