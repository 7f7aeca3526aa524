"""One door for addresses: what a teller may name, and how often what it named is dialled."""

from __future__ import annotations

import ipaddress
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.pb.autonat_pb2 import Message as AutoNatMessage
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net.blobs.bulk_client import NoBulkPortError, read_bulk
from echo_node.net.dht.wire import read_kad, write_kad
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.address_door import (
    LAN,
    UNKNOWN,
    USER,
    AddressDoor,
    DoorLimits,
    Teller,
    Trust,
    book_tellers,
    run_teller,
)
from echo_node.net.discovery.address_scope import Scope, canonical, interfaces, scope, scope_of_ip
from echo_node.net.discovery.seeds import parse_seed
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import join_swarm
from echo_node.net.reachability import autonat
from echo_node.net.reachability.circuit import read_message, write_message
from echo_node.net.swarm import BROKEN, id_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity, encode, limits, peer_id, topics
from protocol.blob import BulkOffer, Slice
from tests.net.behaviour import until
from tests.net.discovery_nodes import searching

ILL, OTHER, THIRD = (Identity(bytes([n]) * 32) for n in (61, 62, 63))
FAR, HOME, SELF = "/ip4/203.0.114.7/tcp/4001", "/ip4/192.168.1.9/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
NEARER = {
    Scope.PUBLIC: [
        HOME,
        SELF,
        "/ip4/100.64.0.1/tcp/4001",
        "/ip4/169.254.169.254/tcp/4001",
        "/ip6/fd00::1/tcp/4001",
    ],
    Scope.SHARED: [HOME, SELF, "/ip4/10.0.0.1/tcp/4001", "/ip4/169.254.1.1/tcp/4001"],
    Scope.PRIVATE: [SELF, "/ip6/::1/tcp/4001", "/ip6/::ffff:127.0.0.1/tcp/4001", "/ip4/169.254.1.1/tcp/4001"],
}
NOWHERE = [
    "/ip4/0.0.0.0/tcp/4001",
    "/ip4/0.1.2.3/tcp/4001",
    "/ip4/224.0.0.251/tcp/5353",
    "/ip4/255.255.255.255/tcp/4001",
    "/ip4/240.0.0.1/tcp/4001",
    "/ip6/::/tcp/4001",
    "/ip6/ff02::1/tcp/4001",
    "/ip6/fe80::1/tcp/4001",
    "/ip6/fec0::1/tcp/4001",
    "/ip6/::127.0.0.1/tcp/4001",
    "/ip6/64:ff9b::7f00:1/tcp/4001",
    "/ip6/64:ff9b::c0a8:101/tcp/4001",
    "/ip6/2002:7f00:1::/tcp/4001",
    "/ip6/::ffff:0:7f00:1/tcp/4001",
    "/ip6/2001:4860::5efe:7f00:1/tcp/4001",
    "/ip6/2001:4860::200:5efe:c0a8:101/tcp/4001",
    "/ip4/203.0.114.7/udp/4001",
    "/ip4/203.0.114.7/tcp/0",
    "/ip4/203.0.114.7/tcp/65536",
    "/ip4/0203.0.114.7/tcp/4001",
    "/unix/tmp",
    "",
]


def peer(met, budget="somebody"):
    return Teller(Trust.PEER, met, budget)


# the rules, by themselves


@pytest.mark.parametrize("met", NEARER)
async def test_nobody_names_what_is_nearer_than_itself(met):
    door = AddressDoor()
    assert door.admit(OTHER.public, [*NEARER[met], FAR], peer(met)) == [FAR]
    assert not any(door.allows(OTHER.public, each) for each in NEARER[met])
    assert door.allows(OTHER.public, FAR)


@pytest.mark.parametrize("address", NOWHERE)
async def test_what_leads_nowhere_is_admitted_from_nobody(address):
    door = AddressDoor()
    assert door.admit(OTHER.public, [address], USER) == []
    assert not door.take(OTHER.public, address)


@given(st.ip_addresses(), st.integers(1, 65_535), st.sampled_from(Scope), st.sampled_from(Trust))
def test_what_is_admitted_is_never_nearer_than_its_teller_nor_a_port_of_the_system(ip, port, met, trust):
    address = f"/ip{ip.version}/{ip}/tcp/{port}"
    for one in AddressDoor().admit(OTHER.public, [address], Teller(trust, met, "")):
        assert scope(one) >= max(met, Scope.LOOPBACK)
        assert port >= 1_024 or trust is Trust.USER
        assert canonical(one) == one


@given(st.ip_addresses())
def test_every_spelling_of_an_ip_address_has_one_scope_and_one_form(ip):
    texts = {str(ip), ip.exploded, ip.exploded.upper()}
    if ip.version == 4:
        texts = {str(ip)} | {f"::ffff:{ip}", ipaddress.IPv6Address(f"::ffff:{ip}").exploded}
    assert len({scope_of_ip(each) for each in texts}) == 1
    spellings = {canonical(f"/ip{6 if ':' in each else 4}/{each}/tcp/04001") for each in texts}
    assert len(spellings) == 1


@given(
    st.text(max_size=80) | st.from_regex(r"/(ip4|ip6|dns4|dns)/[a-z.0-9:-]{0,40}/tcp/\d{1,6}(/p2p/\w{0,60})?")
)
def test_no_text_does_anything_but_pass_or_fail(text):
    door = AddressDoor()
    for each in door.admit(OTHER.public, [text], peer(Scope.PUBLIC)):
        assert each.startswith(("/ip4/", "/ip6/", "/dns"))


async def test_a_circuit_is_as_near_as_its_relay_and_admits_the_relays_address_too():
    door, relay = AddressDoor(), peer_id(THIRD.public)
    near, far = (f"{way}/p2p/{relay}/p2p-circuit" for way in (SELF, FAR))
    low = f"/ip4/203.0.114.7/tcp/22/p2p/{relay}/p2p-circuit"
    assert door.admit(OTHER.public, [near, far, low, f"/p2p/{relay}/p2p-circuit"], peer(Scope.PUBLIC)) == [
        far
    ]
    assert door.allows(THIRD.public, FAR)
    assert not door.allows(THIRD.public, SELF)


async def test_ports_below_1024_are_for_seeds_that_the_user_named():
    low = "/ip4/203.0.114.7/tcp/443"
    for teller in (peer(Scope.LOOPBACK), LAN, run_teller([low]), *book_tellers([low], [low])):
        assert AddressDoor().admit(OTHER.public, [low], teller) == []
    assert AddressDoor().admit(OTHER.public, [low], USER) == [low]


async def test_a_run_with_a_public_seed_sends_nobody_to_a_nearer_one():
    door = AddressDoor()
    assert door.admit(OTHER.public, [SELF, HOME, FAR], run_teller([SELF, HOME, FAR])) == [FAR]
    assert door.admit(OTHER.public, [SELF, HOME], run_teller(["/dns4/seed.example/tcp/4001", SELF])) == []
    assert AddressDoor().admit(OTHER.public, [SELF], run_teller([SELF])) == [SELF]


async def test_what_a_book_holds_is_no_nearer_than_its_peer_was_met():
    for dialled, signed, kept in (
        ([FAR], [SELF, HOME], []),
        ([HOME], [SELF, HOME, FAR], [HOME, FAR]),
        ([SELF], [SELF, HOME], [SELF, HOME]),
        ([], [SELF, FAR], [FAR]),
        ([], [SELF], [SELF]),
    ):
        door = AddressDoor()
        assert door.admit(OTHER.public, signed, book_tellers(dialled, signed)[1]) == kept


async def test_an_address_where_nobody_answers_has_three_tries_and_then_a_rest(autojump_clock):  # noqa: ARG001 - it is the clock
    door = AddressDoor()
    door.admit(OTHER.public, [FAR], peer(Scope.PUBLIC))
    assert [door.take(OTHER.public, FAR) for _ in range(5)] == [True] * 3 + [False] * 2
    door.admit(OTHER.public, [FAR], peer(Scope.PUBLIC, "another"))
    assert not door.take(OTHER.public, FAR), "naming it again gives it no new tries"
    await trio.sleep(DoorLimits().rest)
    assert door.take(OTHER.public, FAR)


async def test_one_address_under_many_keys_is_one_address(autojump_clock):  # noqa: ARG001 - it is the clock
    door = AddressDoor()
    keys = [n.to_bytes(32) for n in range(1, 40)]
    for key in keys:
        door.admit(key, [FAR], peer(Scope.PUBLIC))
    taken = sum(door.take(key, FAR) for key in keys)
    assert taken == DoorLimits().endpoint_burst
    await trio.sleep(61)
    assert sum(door.take(key, FAR) for key in keys) == 1


def far(n):
    return f"/ip4/203.0.{114 + n // 250}.{1 + n % 250}/tcp/4001"


async def test_a_teller_has_a_budget_and_all_together_have_one(autojump_clock):  # noqa: ARG001 - it is the clock
    door, allowed = AddressDoor(), DoorLimits()
    told = [(n.to_bytes(32), far(n)) for n in range(1, 400)]
    for key, way in told:
        door.admit(key, [way], peer(Scope.PUBLIC))
    assert sum(door.take(key, way) for key, way in told) == allowed.teller_burst
    for n, (key, way) in enumerate((n.to_bytes(32), far(n)) for n in range(400, 2_000)):
        door.admit(key, [way], peer(Scope.PUBLIC, f"teller {n % 100}"))
    rest = sum(door.take(n.to_bytes(32), far(n)) for n in range(400, 2_000))
    assert rest == allowed.burst - allowed.teller_burst
    await trio.sleep(1)
    assert sum(door.take(n.to_bytes(32), far(n)) for n in range(400, 2_000)) <= allowed.rate + 1


async def test_dials_that_reach_their_peer_cost_nothing_and_are_never_used_up():
    door = AddressDoor()
    for n in range(1, 500):
        door.admit(n.to_bytes(32), [far(n)], peer(Scope.PUBLIC))
        assert door.take(n.to_bytes(32), far(n))
        door.reached(n.to_bytes(32), far(n))
    assert all(door.take((1).to_bytes(32), far(1)) for _ in range(100))


async def test_a_teller_that_spent_its_budget_keeps_no_address_from_others():
    door = AddressDoor()
    for n in range(1, 70):
        door.admit(n.to_bytes(32), [far(n)], peer(Scope.PUBLIC, "ill"))
        door.take(n.to_bytes(32), far(n))
    door.admit(OTHER.public, [FAR], peer(Scope.PUBLIC, "ill"))
    assert not door.allows(OTHER.public, FAR)
    door.admit(OTHER.public, [FAR], peer(Scope.PUBLIC, "well"))
    assert door.allows(OTHER.public, FAR)


async def test_a_flood_of_addresses_is_bounded_and_drives_out_nobody_elses():
    door = AddressDoor(DoorLimits(most=1_000))
    door.admit(OTHER.public, [FAR], USER)
    door.admit(THIRD.public, [HOME], peer(Scope.PRIVATE, "modest"))
    for n in range(1, 3_000):
        door.admit(n.to_bytes(32), [far(n)], peer(Scope.PUBLIC, f"loud {n % 3}"))
    assert len(door) <= 1_000
    assert door.allows(OTHER.public, FAR)
    assert door.allows(THIRD.public, HOME)


# every way by which an address comes in


def near_address():
    """This machine's address in its network: whoever is met there may not name loopback."""
    found = next((ip for ip in interfaces() if ":" not in ip), None)
    if found is None:
        pytest.skip("this machine has no network but loopback")
    return found


class Trap:
    """A port of loopback that counts who connects to it."""

    def __init__(self, port):
        self.port = port
        self.hits = 0

    @property
    def address(self):
        return f"/ip4/127.0.0.1/tcp/{self.port}"

    @property
    def spellings(self):
        return [self.address, f"/ip6/::ffff:127.0.0.1/tcp/{self.port}", f"/dns4/localhost/tcp/{self.port}"]


@asynccontextmanager
async def trap():
    async def count(stream):
        found.hits += 1
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, count, 0, host="127.0.0.1"))
        found = Trap(listener.socket.getsockname()[1])
        yield found
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def met_at(where, listen="0.0.0.0"):  # noqa: S104 - a test
    """A victim, and an ill peer that has connected to it at one of its addresses."""
    ill = build_host(ILL)
    settings = SwarmSettings(listen=(f"/ip4/{listen}/tcp/0",), public=True)
    async with join_swarm(OTHER, settings) as victim, running(ill, [f"/ip4/{where}/tcp/0"]):
        port = int(victim.host.get_transport_addrs()[0].value_for_protocol("tcp"))
        await ill.connect(PeerInfo(id_of(OTHER.public), [Multiaddr(f"/ip4/{where}/tcp/{port}")]))
        await until(lambda: ILL.public in victim.peers())
        yield victim, ill


def lying(ways, answered):
    """A DHT server that answers every question with peers and providers at these addresses."""

    async def serve(stream):
        await stream.read(4_096)
        answered.append(True)
        made = [id_of(Identity.generate().public) for _ in range(20)]
        closer = {each: [Multiaddr(way) for way in ways] for each in made[:10]}
        providers = {each: [Multiaddr(way) for way in ways] for each in made[10:]}
        answer = write_kad("get-providers", b"k", closer, providers)
        await stream.write(write_length(len(answer)) + answer)

    return serve


async def lied_to(where, trapped):
    """Let a peer that was met somewhere lie in DHT answers and about itself, and go away."""
    answered = []
    async with met_at(where) as (victim, ill):
        ill.set_addrs_factory(lambda _: [Multiaddr(each) for each in trapped.spellings])
        ill.set_stream_handler(TProtocol(topics.KAD_PROTOCOL), lying(trapped.spellings, answered))
        await push(ill)
        await victim._dht.add(id_of(ILL.public), [Multiaddr(f"/ip4/{where}/tcp/1")])
        for n in range(3):
            await victim.find(b"key %d" % n, 3, deadline=3.0)
        assert len(answered) >= 3
        await ill.close()
        await until(lambda: ILL.public not in victim.peers())
        await trio.sleep(1.5)
        return victim


async def push(host):
    from libp2p.identity.identify_push.identify_push import push_identify_to_peers

    await push_identify_to_peers(host)


async def test_no_answer_of_a_peer_from_elsewhere_makes_a_node_dial_a_port_of_its_own_machine():
    async with trap() as trapped:
        victim = await lied_to(near_address(), trapped)
        assert trapped.hits == 0
        assert not any("127.0.0.1" in way for ways in victim.known().values() for way in ways)


async def test_a_peer_on_this_machine_may_name_its_ports_a_few_times():
    async with trap() as trapped:
        await lied_to("127.0.0.1", trapped)
        assert 1 <= trapped.hits <= DoorLimits().endpoint_burst + 2


async def test_what_a_peer_says_of_itself_is_not_dialled_when_it_has_gone_nor_written_down(tmp_path):
    """Identify, identify push and the signed record, after the peer has left."""
    where = near_address()
    async with trap() as trapped:
        book = AddressBook(tmp_path / "book")
        async with searching(listen=f"/ip4/{where}/tcp/0", book=book) as node:
            async with searching(ILL, listen=f"/ip4/{where}/tcp/0", seeds=[node.seed]) as ill:
                ill.host.set_addrs_factory(lambda _: [Multiaddr(each) for each in trapped.spellings])
                await until(lambda: ILL.public in node.peers())
                await push(ill.host)
                await until(lambda: node.host.speaks(id_of(ILL.public), topics.PEERS_STREAM))
                await trio.sleep(1)
            await until(lambda: ILL.public not in node.peers())
            await trio.sleep(2)
            with pytest.raises(BROKEN):
                await node.host.connect_known(id_of(ILL.public))
        assert trapped.hits == 0
        assert not any("127.0.0.1" in way for entry in book for way in entry.addresses)
        book.close()


async def test_peer_exchange_and_the_lan_name_nothing_nearer_than_they_are():
    async with trap() as trapped, searching() as node:
        node.discovery._on_mdns(THIRD.public, trapped.spellings)
        assert node.discovery._admit_from(ILL.public, THIRD.public, trapped.spellings[:2]) == []
        await trio.sleep(1)
        assert trapped.hits == 0


async def test_a_provider_record_holds_what_its_peer_may_name():
    where = near_address()
    async with trap() as trapped, met_at(where) as (victim, ill):
        told = {id_of(ILL.public): [Multiaddr(trapped.address), Multiaddr(f"/ip4/{where}/tcp/4321")]}
        victim._dht._answer(id_of(ILL.public), read_kad(write_kad("add-provider", b"k" * 32, providers=told)))
        assert victim._dht._providers.of(b"k" * 32) == {ILL.public: (Multiaddr(f"/ip4/{where}/tcp/4321"),)}
        await ill.close()
        await victim.find(b"k" * 32, 1, deadline=2)
        assert trapped.hits == 0


async def test_what_is_in_the_peerstore_and_passed_no_door_is_not_dialled():
    async with trap() as trapped, searching() as node:
        node.host.swarm.store.keep(id_of(THIRD.public), [Multiaddr(trapped.address)], 60)
        with pytest.raises(BROKEN):
            await node.host.connect_known(id_of(THIRD.public))
        relay = f"{trapped.address}/p2p/{peer_id(ILL.public)}/p2p-circuit"
        node.host.swarm.store.keep(id_of(THIRD.public), [Multiaddr(relay)], 60)
        with pytest.raises(BROKEN):
            await node.host.connect_known(id_of(THIRD.public))
        with pytest.raises(BROKEN):
            await node.host.swarm.dial_direct(id_of(ILL.public), [Multiaddr(trapped.address)])
        assert trapped.hits == 0


async def test_a_name_that_leads_nearer_than_its_teller_is_not_followed():
    async with trap() as trapped, searching() as node:
        name = f"/dns4/localhost/tcp/{trapped.port}"
        node.host.keep_addresses(id_of(THIRD.public), [name], peer(Scope.PUBLIC), seconds=60)
        with pytest.raises(BROKEN):
            await node.host.connect_known(id_of(THIRD.public))
        assert trapped.hits == 0
        node.host.keep_addresses(id_of(ILL.public), [name], peer(Scope.LOOPBACK), seconds=60)
        with pytest.raises(BROKEN):
            await node.host.connect_known(id_of(ILL.public))
        assert trapped.hits == 1


async def test_a_node_that_announces_a_name_is_found_by_it():
    async with searching() as other, searching() as node:
        port = other.address.rpartition("/")[2]
        name = f"/dns4/LocalHost/tcp/{port}/p2p/{other.identity.peer_id}"
        node.host.keep_addresses(id_of(other.public), [name], peer(Scope.LOOPBACK), seconds=60)
        await node.host.connect_known(id_of(other.public))
        assert other.public in node.peers()


async def test_a_seed_of_a_run_is_dialled_by_the_runs_scope_and_a_users_by_none():
    async with trap() as trapped:
        near = parse_seed(f"{trapped.address}/p2p/{peer_id(ILL.public)}")
        public = parse_seed(f"{FAR}/p2p/{peer_id(THIRD.public)}")
        async with searching(run_seeds=[near, public]):
            await trio.sleep(1)
            assert trapped.hits == 0
        async with searching(run_seeds=[near]):
            await until(lambda: trapped.hits > 0)
        before = trapped.hits
        async with searching(seeds=[near], run_seeds=[near, public]):
            await until(lambda: trapped.hits > before)


async def test_a_book_of_a_poisoned_peer_makes_no_dial_after_a_restart():
    async with trap() as trapped:
        book = AddressBook(None)
        book.reached(THIRD.public, FAR)
        book.signed(THIRD.public, [trapped.address])
        async with searching(book=book) as node:
            await trio.sleep(1)
            assert trapped.hits == 0
            assert trapped.address not in next(each for each in node.discovery._queue).addresses


def test_a_peer_of_the_book_that_never_answered_is_forgotten_after_three_failures():
    book = AddressBook(None)
    book.signed(THIRD.public, [FAR])
    book.reached(OTHER.public, FAR)
    for _ in range(3):
        book.failed(THIRD.public)
        book.failed(OTHER.public)
    assert book.get(THIRD.public) is None
    assert book.get(OTHER.public) is not None


async def test_a_relay_names_no_address_for_its_guests_that_is_nearer_than_itself():
    where = near_address()
    async with met_at(where) as (victim, _):
        ways = victim.host.circuits._ways(
            id_of(ILL.public), [Multiaddr(each).to_bytes() for each in ("/ip4/192.168.7.7/tcp/22", FAR)]
        )
        assert [str(each) for each in ways] == [f"{FAR}/p2p/{peer_id(ILL.public)}/p2p-circuit"]


async def test_autonat_dials_no_port_of_the_system():
    async with met_at("127.0.0.1", listen="127.0.0.1") as (victim, ill):
        stream = await ill.new_stream(id_of(OTHER.public), [autonat.PROTOCOL])
        question = AutoNatMessage(type=AutoNatMessage.DIAL)
        question.dial.peer.addrs.append(Multiaddr("/ip4/127.0.0.1/tcp/22").to_bytes())
        await write_message(stream, question)
        answer = await read_message(stream, AutoNatMessage)
        assert answer.dialResponse.status == AutoNatMessage.E_DIAL_REFUSED
        assert not victim.reachability.autonat._dials


async def test_a_bulk_port_of_the_system_is_not_dialled():
    async def offered(_peer, _question):
        await trio.lowlevel.checkpoint()
        return encode(BulkOffer(pin=bytes(32), port=22, seconds=30, token=bytes(32)))

    async with met_at("127.0.0.1", listen="127.0.0.1") as (victim, _):
        settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), seeds=(victim.addresses[0],), bulk=False)
        async with join_swarm(THIRD, settings) as server:
            await until(lambda: THIRD.public in victim.peers())
            serving = server.serve(topics.BULK_STREAM, offered, most=limits.SMALL_BYTES)
            with serving, pytest.raises(NoBulkPortError, match="port 22"):
                await read_bulk(
                    victim,
                    THIRD.public,
                    [Slice(bytes(32), 0, 10)],
                    [10],
                    lambda *_: None,
                    threads=trio.CapacityLimiter(1),
                )


async def test_keys_of_one_network_share_one_budget_and_those_of_loopback_do_not():
    async with met_at(near_address()) as (victim, _):
        assert victim.host.swarm.teller(id_of(ILL.public)) == peer(Scope.PRIVATE, near_address())
        assert victim.host.swarm.teller(id_of(THIRD.public)) == UNKNOWN
    async with met_at("127.0.0.1", listen="127.0.0.1") as (victim, _):
        assert victim.host.swarm.teller(id_of(ILL.public)) == peer(Scope.LOOPBACK, peer_id(ILL.public))


def test_a_teller_that_has_gone_is_taken_for_the_furthest():
    assert not UNKNOWN.may_name(HOME)
    assert UNKNOWN.may_name(FAR)
    assert replace(UNKNOWN, met=Scope.LOOPBACK).may_name(SELF)
