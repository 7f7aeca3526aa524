"""Whether a node can be dialled, what it does when it cannot, and what relays put up with."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from functools import cached_property, partial
from pathlib import Path

import pytest
import trio
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from echo_node.net.discovery.address_door import USER
from echo_node.net.host import build_host, running
from echo_node.net.reachability import autonat, multiaddrs, reachability
from echo_node.net.reachability.autonat import AutoNat
from echo_node.net.reachability.circuit import HOP, STOP, RelayError, read_message, write_message
from echo_node.net.reachability.reachability import Reachability
from echo_node.net.reachability.relay import Bounds, Relay
from echo_node.net.swarm import key_of
from protocol import Identity
from tests.net.behaviour import until
from tests.net.namespaces import internet
from tests.net.reachability_node import ECHO, digest, send

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def host(seed, *listen):
    made = build_host(Identity(seed.to_bytes(2, "big") * 16))
    made.set_stream_handler(ECHO, digest)
    async with running(made, listen):
        yield made


@asynccontextmanager
async def node(seed, *listen, **options):
    async with host(seed, *listen) as made, trio.open_nursery() as nursery:
        place = Reachability(made, **options)
        nursery.start_soon(place.run)
        yield made, place
        nursery.cancel_scope.cancel()


async def connect(one, other):
    await one.connect(PeerInfo(other.get_id(), other.get_addrs()))
    await until(lambda: one.speaks(other.get_id(), "/ipfs/id/1.0.0"))


async def through(caller, relay, target):
    """Connect the caller to the target's slot at the relay."""
    way = Multiaddr(f"{relay.get_addrs()[0]}/p2p-circuit/p2p/{target.get_id()}")
    await caller.connect(PeerInfo(target.get_id(), [way]))


@asynccontextmanager
async def relayed(bounds=None):
    """A relay, and two nodes that listen on nothing, the second of which has a slot."""
    async with host(1, LOOPBACK) as middle, host(2) as caller, host(3) as target:
        service = Relay(middle, bounds)
        service.start()
        await connect(caller, middle)
        await connect(target, middle)
        await target.circuits.reserve(middle.get_id())
        yield service, middle, caller, target


# --- what AutoNAT finds -------------------------------------------------------------------------


async def test_a_node_that_can_be_dialled_learns_that_it_can():
    async with node(1, LOOPBACK) as (server, _), node(2, LOOPBACK) as (asker, place):
        await connect(asker, server)
        await until(lambda: place.state == "public")
        assert place.one_line() == "Other nodes can dial this machine."
        assert [str(each) for each in place.advertised()] == [str(each) for each in asker.get_addrs()]
        assert place._confirmed == asker.get_transport_addrs()
        assert len(server.swarm.get_connections(asker.get_id())) == 1, "the dial back leaves nothing behind"


async def test_a_node_that_listens_where_nobody_gets_through_learns_that_it_cannot_be_dialled():
    # it is seen as 127.0.0.1 and listens on another address, as one that a firewall hides
    async with (
        node(1, LOOPBACK, public=True) as (server, _),
        node(2, "/ip4/127.0.0.3/tcp/0") as (asker, place),
    ):
        await connect(asker, server)
        await until(lambda: place.state == "private" and asker.circuits.slots)
        port = multiaddrs.port_of(asker.get_transport_addrs()[0])
        assert place.one_line() == (
            "This machine is behind NAT or a firewall: others reach it through 1 relay. Sampling works as it is; "
            f"serving weights to others is slower. To be reachable directly, forward TCP port {port}."
        )
        (own,) = place.advertised()
        assert str(own) == f"{server.get_addrs()[0]}/p2p-circuit/p2p/{asker.get_id()}"


async def test_a_node_that_listens_on_nothing_need_not_ask():
    async with node(1) as (_, place):
        await until(lambda: place.state == "private")
        assert place.one_line() == (
            "This machine listens on no port: others cannot reach it, and no relay has a slot for it yet. Sampling "
            "works as it is, over the connections that it opens itself. To be reachable directly, let it listen on "
            "a TCP port."
        )
        assert place.advertised() == []


async def test_before_anybody_has_answered_nothing_is_known():
    async with node(1, LOOPBACK) as (_, place):
        assert place.state == "unknown"
        assert "not known yet" in place.one_line()


async def asked(asker, server, *offered, peer=None):
    """What the server answers to a question of the asker's making."""
    question = Message(type=Message.DIAL)
    question.dial.peer.id = peer if peer is not None else asker.get_id().to_bytes()
    question.dial.peer.addrs.extend(Multiaddr(each).to_bytes() for each in offered)
    stream = await asker.new_stream(server.get_id(), [autonat.PROTOCOL])
    await write_message(stream, question)
    return (await read_message(stream, Message)).dialResponse


async def test_nobody_else_is_dialled_on_an_askers_word():
    calls = []

    async def victim(stream):
        calls.append(stream.socket.getsockname()[0])
        await stream.aclose()

    async with host(1, LOOPBACK) as server, host(2) as asker, trio.open_nursery() as nursery:
        AutoNat(server)
        await connect(asker, server)
        serve = partial(trio.serve_tcp, victim, 0, host="0.0.0.0")  # noqa: S104 -- on each address of this machine
        (listener,) = await nursery.start(serve)
        port = listener.socket.getsockname()[1]
        said = await asked(asker, server, f"/ip4/127.0.0.2/tcp/{port}", f"/dns4/localhost/tcp/{port}")
        assert said.status == Message.E_DIAL_ERROR
        assert set(calls) == {"127.0.0.1"}, "the asker's own address alone"
        nursery.cancel_scope.cancel()


async def test_another_node_at_the_askers_address_does_not_count_for_it():
    async with host(1, LOOPBACK) as server, host(2) as asker, host(3, LOOPBACK) as neighbour:
        AutoNat(server)
        await connect(asker, server)
        said = await asked(asker, server, str(neighbour.get_transport_addrs()[0]))
        assert said.status == Message.E_DIAL_ERROR


async def test_a_server_dials_no_more_often_than_its_bounds_say():
    async with host(1, LOOPBACK) as server, host(2, LOOPBACK) as asker:
        AutoNat(server)
        await connect(asker, server)
        own = str(asker.get_transport_addrs()[0])
        said = [(await asked(asker, server, own)).status for _ in range(4)]
        assert said == [Message.OK] * 3 + [Message.E_DIAL_REFUSED]


async def test_questions_for_others_and_without_ports_are_refused():
    async with host(1, LOOPBACK) as server, host(2, LOOPBACK) as asker:
        AutoNat(server)
        await connect(asker, server)
        own = str(asker.get_transport_addrs()[0])
        assert (
            await asked(asker, server, own, peer=server.get_id().to_bytes())
        ).status == Message.E_BAD_REQUEST
        assert (await asked(asker, server)).status == Message.E_DIAL_REFUSED
        assert (await asked(asker, server, "/ip4/127.0.0.1/udp/5")).status == Message.E_DIAL_REFUSED


async def test_who_comes_through_a_relay_is_not_dialled_back():
    async with relayed() as (_, middle, caller, target):
        AutoNat(target)
        await through(caller, middle, target)
        assert (await asked(caller, target, "/ip4/127.0.0.1/tcp/5")).status == Message.E_DIAL_REFUSED


async def test_one_contrary_finding_is_doubted_and_the_second_believed():
    async with host(1, LOOPBACK) as made:
        place = Reachability(made)
        assert not place._learn(dialled=True)
        assert place.state == "public"
        assert place.relay.serving
        assert place._learn(dialled=False)
        assert place.state == "public"
        assert not place._learn(dialled=True)
        assert place._learn(dialled=False)
        assert not place._learn(dialled=False)
        assert place.state == "private"
        assert not place.relay.serving


# --- circuits -----------------------------------------------------------------------------------


async def test_a_circuit_is_a_connection_like_any_other_and_is_known_as_relayed():
    async with relayed() as (service, middle, caller, target):
        await through(caller, middle, target)
        assert caller.is_relayed(target.get_id())
        assert target.is_relayed(caller.get_id())
        assert not caller.is_relayed(middle.get_id())
        assert await send(caller, target.get_id(), 100_000)
        assert await send(target, caller.get_id(), 100_000), "streams open from both ends"
        assert service.circuits == 1
        await caller.disconnect(target.get_id())
        await until(lambda: service.circuits == 0 and target.get_id() not in caller.get_connected_peers())
        await until(lambda: caller.get_id() not in target.get_connected_peers())


async def test_a_circuit_goes_through_a_relay_that_the_caller_has_never_met():
    async with relayed() as (_, middle, caller, target):
        await caller.disconnect(middle.get_id())
        await until(lambda: not caller.direct(middle.get_id()))
        await through(caller, middle, target)
        assert await send(caller, target.get_id(), 10)


async def test_a_circuit_through_oneself_and_one_through_two_relays_are_no_ways():
    async with relayed() as (_, middle, caller, target):
        way = f"{middle.get_addrs()[0]}/p2p-circuit/p2p"
        assert multiaddrs.to(Multiaddr(f"{way}/{caller.get_id()}/p2p-circuit"), target.get_id()) is None
        assert multiaddrs.to(Multiaddr(f"{way}/{middle.get_id()}"), middle.get_id()) is None
        with pytest.raises(OpenConnectionError):
            await middle.circuits.dial(Multiaddr(f"{way}/{target.get_id()}"))


async def test_the_relay_reads_nothing_of_what_it_carries():
    heard = []

    class Tapped:
        def __init__(self, stream):
            self._stream = stream

        async def read(self, count):
            heard.append(await self._stream.read(count))
            return heard[-1]

        def __getattr__(self, name):
            return getattr(self._stream, name)

    class Curious(Relay):
        async def _carry(self, one, other):
            await super()._carry(Tapped(one), Tapped(other))

    async with relayed() as (service, middle, caller, target):
        service.stop()
        curious = Curious(middle)
        curious.start()
        await target.circuits.reserve(middle.get_id())
        await through(caller, middle, target)
        assert await send(caller, target.get_id(), 50_000)
        carried = b"".join(heard)
        assert len(carried) > 50_000
        assert bytes(range(256)) not in carried
        assert ECHO.encode() not in carried


async def test_a_direct_way_is_preferred_and_ends_the_being_relayed():
    async with relayed() as (_, middle, caller, target), trio.open_nursery():
        await through(caller, middle, target)
        await target.swarm.listen(Multiaddr(LOOPBACK))
        ways = target.get_transport_addrs()
        caller.door.admit(key_of(target.get_id()), map(str, ways), USER)
        await caller.swarm.dial_direct(target.get_id(), ways)
        assert not caller.is_relayed(target.get_id())
        stream = await caller.new_stream(target.get_id(), [ECHO])
        assert stream.get_remote_address() is not None, "the stream went over the direct connection"
        await stream.reset()


async def test_a_connection_that_has_closed_is_not_used_again():
    async with host(1, LOOPBACK) as one, host(2) as two:
        await connect(two, one)
        (old,) = two.swarm.get_connections(one.get_id())
        old.event_closed.set()  # as it is for a while, until the swarm has forgotten it
        await two.connect(PeerInfo(one.get_id(), one.get_addrs()))
        assert await send(two, one.get_id(), 10)
        await old.muxed_conn.close()


async def test_identify_tells_the_circuit_by_which_a_private_node_is_reached():
    async with (
        node(1, LOOPBACK, public=True) as (middle, _),
        node(2, relays=1) as (target, place),
        host(3) as caller,
    ):
        await connect(target, middle)
        await connect(caller, middle)
        await until(place.advertised)
        way = f"{middle.get_addrs()[0]}/p2p-circuit"
        await until(
            lambda: (
                str(Multiaddr(way)) in {str(multiaddrs.bare(x)) for x in middle.addresses_of(target.get_id())}
            )
        )
        await through(caller, middle, target)
        await until(lambda: caller.addresses_of(target.get_id()))
        await caller.disconnect(target.get_id())
        await until(lambda: target.get_id() not in caller.get_connected_peers())
        assert await send(caller, target.get_id(), 10), "what identify told is enough to dial again"


async def test_a_slot_ends_with_the_connection_to_its_relay():
    async with relayed() as (_, middle, caller, target):
        await target.disconnect(middle.get_id())
        await until(lambda: target.get_id() not in middle.get_connected_peers())
        with pytest.raises(SwarmException):
            await through(caller, middle, target)


async def test_a_lost_relay_is_replaced_by_another(monkeypatch):
    monkeypatch.setattr(reachability, "TICK_SECONDS", 0.05)
    async with (
        node(1, LOOPBACK, public=True) as (first, _),
        node(2, LOOPBACK, public=True) as (second, _),
        node(3, relays=1) as (target, place),
    ):
        await connect(target, first)
        await until(place.advertised)
        await connect(target, second)
        await target.disconnect(first.get_id())
        await until(lambda: set(target.circuits.slots) == {second.get_id()})
        assert str(second.get_id()) in str(place.advertised()[0])


async def test_a_relay_that_stops_relaying_is_left(monkeypatch):
    monkeypatch.setattr(reachability, "TICK_SECONDS", 0.05)
    async with node(1, LOOPBACK, public=True) as (middle, service), node(2) as (target, place):
        await connect(target, middle)
        await until(place.advertised)
        service.state = "private"
        service._serve()
        await until(lambda: not place.advertised())


# --- bounds -------------------------------------------------------------------------------------


async def test_the_129th_slot_is_refused_and_a_slot_that_is_free_again_is_not():
    async with host(1, LOOPBACK) as middle, trio.open_nursery() as nursery:
        service = Relay(middle, Bounds(slots_per_address=1_000))
        service.start()
        guests = []

        async def guest(seed, task_status):
            async with host(seed) as made:
                await made.connect(PeerInfo(middle.get_id(), middle.get_addrs()))
                guests.append(made)
                task_status.started(made)
                await trio.sleep_forever()

        for seed in range(100, 228):
            made = await nursery.start(guest, seed)
            await made.circuits.reserve(middle.get_id())
        late = await nursery.start(guest, 999)
        with pytest.raises(RelayError) as refused:
            await late.circuits.reserve(middle.get_id())
        assert refused.value.status == Status.RESERVATION_REFUSED
        assert len(service.slots) == 128
        await guests[5].circuits.reserve(middle.get_id())  # one that has a slot renews it
        await guests[0].disconnect(middle.get_id())
        await until(lambda: not middle.direct(guests[0].get_id()))
        await late.circuits.reserve(middle.get_id())
        nursery.cancel_scope.cancel()


async def test_one_address_does_not_get_every_slot():
    async with relayed(Bounds(slots_per_address=1)) as (_, middle, caller, target):
        with pytest.raises(RelayError):
            await caller.circuits.reserve(middle.get_id())
        await target.circuits.reserve(middle.get_id())


@pytest.mark.parametrize(
    "bounds",
    [Bounds(circuit_bytes=300_000), Bounds(circuit_seconds=4, circuit_rate=50_000.0)],
    ids=["bytes", "seconds"],
)
async def test_a_circuit_over_its_bound_is_cut(bounds):
    async with relayed(bounds) as (service, middle, caller, target):
        await through(caller, middle, target)
        assert await send(caller, target.get_id(), 1_000)
        with pytest.raises(StreamError), trio.fail_after(15):
            await send(caller, target.get_id(), 1_000_000)
        await until(lambda: service.circuits == 0 and not caller.is_relayed(target.get_id()))


async def test_a_circuit_that_nobody_uses_is_cut():
    async with relayed(Bounds(idle_seconds=0.5)) as (service, middle, caller, target):
        await through(caller, middle, target)
        await until(lambda: service.circuits == 0)
        await until(lambda: not target.is_relayed(caller.get_id()))


async def test_a_circuit_goes_no_faster_than_its_rate():
    async with relayed(Bounds(circuit_rate=500_000.0)) as (_, middle, caller, target):
        await through(caller, middle, target)
        begun = trio.current_time()
        assert await send(caller, target.get_id(), 1_000_000)
        assert 1.5 < trio.current_time() - begun < 5


async def test_no_more_circuits_than_the_bounds_say():
    async with relayed(Bounds(circuits_per_peer=1)) as (service, middle, caller, target), host(4) as other:
        await connect(other, middle)
        await through(caller, middle, target)
        with pytest.raises(SwarmException, match="RESOURCE_LIMIT_EXCEEDED"):
            await through(other, middle, target)
        assert service.circuits == 1


async def hop(asker, server, message):
    stream = await asker.new_stream(server.get_id(), [HOP])
    await write_message(stream, message)
    return (await read_message(stream, HopMessage)).status


async def test_no_circuits_over_circuits_and_none_to_strangers():
    async with relayed() as (_, middle, caller, target):
        Relay(target).start()
        await through(caller, middle, target)
        assert await hop(caller, target, HopMessage(type=HopMessage.RESERVE)) == Status.PERMISSION_DENIED
        stranger = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=caller.get_id().to_bytes()))
        assert await hop(target, middle, stranger) == Status.NO_RESERVATION


async def test_only_a_relay_of_ones_own_choice_brings_callers():
    async with host(1, LOOPBACK) as pushy, host(2) as target:
        await connect(target, pushy)
        stream = await pushy.new_stream(target.get_id(), [STOP])
        await write_message(
            stream, StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=pushy.get_id().to_bytes()))
        )
        assert (await read_message(stream, StopMessage)).status == Status.PERMISSION_DENIED


async def test_a_strangers_garbage_harms_nothing(monkeypatch):
    # A muted stranger would be refused after a few turns, and the rest would prove nothing.
    monkeypatch.setattr("echo_node.net.peer_scoring.TOLERATED", 10**6)
    chance = random.Random(7)
    async with node(1, LOOPBACK, public=True) as (victim, place), host(2) as stranger, host(3) as guest:
        await connect(stranger, victim)
        await connect(guest, victim)
        await guest.circuits.reserve(victim.get_id())
        valid = [
            HopMessage(type=HopMessage.RESERVE).SerializeToString(),
            HopMessage(
                type=HopMessage.CONNECT, peer=PeerId(id=guest.get_id().to_bytes())
            ).SerializeToString(),
            HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=b"x" * 38)).SerializeToString(),
            StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=b"")).SerializeToString(),
            b"\x08\x00\x12\x10\x0a\x0e" + bytes(14),
        ]
        for turn in range(120):
            body = bytearray(chance.choice(valid))
            for _ in range(chance.randrange(4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            sent = chance.choice(
                [
                    bytes([len(body)]) + body,
                    chance.randbytes(40),
                    b"\xff" * 12,
                    b"\xff\xff\xff\x7f" + body,
                    b"\x20",
                ]
            )
            protocol = (HOP, STOP, autonat.PROTOCOL)[turn % 3]
            stream = await stranger.new_stream(victim.get_id(), [protocol])
            with trio.move_on_after(5):
                await stream.write(sent)
                await stream.reset()
        await until(lambda: place.relay.circuits == 0)
        assert len(place.relay.slots) <= 2
        assert len(place.autonat._dials) <= 3
        await through(stranger, victim, guest)
        assert await send(stranger, guest.get_id(), 10), "the relay still relays"


# --- a small internet, with real processes and real NAT -----------------------------------------


class Process:
    """A node on a machine of the small internet."""

    def __init__(self, machine, seed, *, public=False):
        root = Path(__file__).parents[2]
        words = [sys.executable, "-m", "tests.net.reachability_node", str(seed), "/ip4/0.0.0.0/tcp/4001"]
        self._process = subprocess.Popen(
            machine.command(*words, "public" if public else "ask"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        self.seen = machine.seen

    @cached_property
    def id(self):
        return json.loads(self._process.stdout.readline())["id"]

    @property
    def address(self):
        return f"/ip4/{self.seen}/tcp/4001/p2p/{self.id}"

    def do(self, what, **more):
        assert self.id
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def look_until(self, condition, seconds=30):
        end = time.monotonic() + seconds
        while not condition(seen := self.do("look")):
            assert time.monotonic() < end, seen
            time.sleep(0.2)
        return seen

    def kill(self):
        self._process.kill()
        self._process.communicate()


def test_two_nodes_without_a_route_to_each_other_work_through_a_relay_and_through_another_when_it_dies():
    processes = []

    def start(*words, **more):
        processes.append(Process(*words, **more))
        return processes[-1]

    with internet() as net:
        try:
            relays = [start(net.public(), seed, public=True) for seed in (1, 2)]
            one, two = start(net.home(), 3), start(net.home(), 4)
            for each in (one, two):
                for relay in relays:
                    each.do("connect", to=[relay.address])
            seen = two.look_until(lambda look: look["relays"] == 2)
            assert seen["state"] == "private"
            assert "others reach it through 2 relays" in seen["line"]
            assert seen["line"].endswith("forward TCP port 4001.")
            assert sum("/p2p-circuit" in each for each in seen["addresses"]) == 2

            assert one.do("dial", peer=two.id, to=seen["addresses"])["relayed"]
            assert one.do("send", peer=two.id, bytes=1_000)["same"]
            assert two.do("send", peer=one.id, bytes=1_000)["same"]
            assert one.do("send", peer=two.id, bytes=5_000_000)["same"]

            carrier = next(each for each in relays if each.do("look")["circuits"] == 1)
            carrier.kill()
            one.look_until(lambda look: not look["relayed"])
            left = two.look_until(lambda look: look["relays"] == 1)
            assert one.do("dial", peer=two.id, to=left["addresses"])["relayed"]
            assert one.do("send", peer=two.id, bytes=5_000_000)["same"]
        finally:
            for each in processes:
                each.kill()


def test_a_machine_of_the_internet_finds_that_it_can_be_dialled_and_then_relays():
    with internet() as net:
        processes = [Process(net.public(), 1, public=True)]
        try:
            processes += [Process(net.public(), 2), Process(net.home(), 3)]
            server, fresh, guest = processes
            fresh.do("connect", to=[server.address])
            seen = fresh.look_until(lambda look: look["state"] == "public")
            assert seen["addresses"] == [fresh.address]
            guest.do("connect", to=[fresh.address])
            guest.look_until(lambda look: look["relays"] == 1)
            assert "It relays for 1 node that" in fresh.do("look")["line"]
        finally:
            for each in processes:
                each.kill()
