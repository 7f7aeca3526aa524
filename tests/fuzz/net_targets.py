"""Targets of the network below all roles: messages before and after authentication.

The host is the real one and listens nowhere; each input has fresh parts around it, so that it can
be repeated alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.pb.autonat_pb2 import Message as AutoNatMessage
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage
from multiaddr import Multiaddr

from echo_node.net.base import ACCEPT
from echo_node.net.dht.kademlia import Dht
from echo_node.net.dht.wire import write_kad
from echo_node.net.discovery.dial_queue import DialQueue, Source
from echo_node.net.gossip.router import Gossip
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import HardHost, build_host
from echo_node.net.identify import PING, PUSH
from echo_node.net.peer_scoring import PeerScores
from echo_node.net.reachability.autonat import AutoNat
from echo_node.net.reachability.circuit import HOP, STOP, Circuits, Slot
from echo_node.net.reachability.relay import Relay
from echo_node.net.request_response import RequestResponse
from echo_node.net.swarm import BROKEN, id_of
from tests.fuzz.decoders import DHT, GOSSIP
from tests.fuzz.loops import bare, looped
from tests.fuzz.target import Target
from tests.fuzz.wires import ME, PEER, Wire, framed

_KEY: Final = b"\x1e\x20" + bytes(32)
_TOPIC: Final = "one"
Handler = Callable[[Any], Awaitable[object]]


@functools.cache
def host() -> HardHost:
    return build_host(ME)


def _prefixed(data: bytes) -> bytes:
    return write_length(len(data)) + data


def starts(*said: bytes) -> list[bytes]:
    """Each whole and then the end; in single bytes; and cut in half, followed by silence."""
    return [each for data in said for each in (b"\0" + data, b"\2" + data, b"\1" + data[: len(data) // 2])]


def _stream(
    name: str, entry: str, make: Callable[[], Handler], *seeds: bytes, patient: bool = False
) -> Target:
    """A target whose input comes over a stream of a connected peer."""

    async def feed(data: bytes) -> None:
        await make()(Wire(data))

    return Target(
        name=name,
        entry=entry,
        opener=functools.partial(looped, bare(feed), patient=patient),
        seeds=lambda: starts(*seeds),
        also=BROKEN,
        prefix=1,
    )


# What handlers read


def _gossip() -> Handler:
    found = Gossip(host(), PeerScores(), Counter())
    found._mesh.add(PEER.public)
    found._outgoing[PEER.public] = _outgoing()

    async def read(wire: Wire) -> None:
        async with found.subscribe(_TOPIC, lambda _message: ACCEPT):
            await found._read(wire)

    return read


def _outgoing() -> Any:
    from echo_node.net.gossip.router import _Outgoing

    return _Outgoing()


def _dht() -> Dht:
    candidates = DialQueue(ME.public, trio.current_time)

    def suggest(public: bytes, addresses: Any, _why: str) -> None:
        candidates.add(public, addresses, Source.SUGGESTED)

    return Dht(host(), PeerScores(), Counter(), suggest)


def _push() -> Handler:
    return host()._handle_push


def _ping() -> Handler:
    return host().multiselect.handlers[PING]


def _relay() -> Handler:
    relay = Relay(host())
    relay.start()
    return relay._asked


def _circuit() -> Handler:
    circuits = Circuits(host())
    circuits.slots[id_of(PEER.public)] = Slot(id_of(PEER.public), 1e9, ())
    return circuits._called


def _autonat() -> Handler:
    async def nobody(*_args: Any) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    found = AutoNat(host())
    found._dials_through = nobody  # type: ignore[method-assign] -- a fuzzer dials nobody
    return found._asked


def _questions() -> Handler:
    async def echo(_peer: bytes, question: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return question

    asking = RequestResponse(host(), Counter())
    serving = asking.serve("/fuzz/1", echo, most=512)

    async def take(wire: Wire) -> None:
        with serving:
            await host().multiselect.handlers[TProtocol("/fuzz/1")](wire)

    return take


def _negotiation() -> Handler:
    return host()._swarm_stream_handler


# What askers read


def _answering(ask: Callable[[HardHost], Awaitable[object]]) -> Handler:
    """Ask, and read what the wire says."""

    async def answered(wire: Wire) -> None:
        async def new_stream(*_args: Any) -> Wire:
            await trio.lowlevel.checkpoint()
            return wire

        there = host()
        there.new_stream = new_stream  # type: ignore[method-assign, assignment]
        try:
            await ask(there)
        finally:
            del there.new_stream

    return answered


async def _ask(there: HardHost) -> None:
    with trio.move_on_after(10):  # who asks sets the deadline
        await RequestResponse(there, Counter()).request(PEER.public, "/fuzz/1", b"question", 512)


async def _converse(_there: HardHost) -> None:
    dht = _dht()
    answer = await dht._ask(id_of(PEER.public), write_kad("get-providers", _KEY))
    if answer is not None:
        dht._remember(answer.closer)


async def _reserve(there: HardHost) -> None:
    circuits = Circuits(there)

    async def hop(*_args: Any) -> Any:
        return await there.new_stream(id_of(PEER.public), [HOP])

    circuits._hop = hop  # type: ignore[method-assign]
    await circuits.reserve(id_of(PEER.public))


async def _dial_us(there: HardHost) -> None:
    found = AutoNat(there)
    there.direct = lambda _peer: [object()]  # type: ignore[method-assign, assignment, list-item]
    try:
        await found.ask(id_of(PEER.public), [Multiaddr("/ip4/192.0.2.7/tcp/4001")])
    finally:
        del there.direct


_HOPS: Final = [
    HopMessage(type=HopMessage.RESERVE),
    HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=id_of(PEER.public).to_bytes())),
    HopMessage(
        type=HopMessage.CONNECT, peer=PeerId(id=id_of(bytes(32)).to_bytes(), addrs=[b"\x04\x7f\0\0\1"])
    ),
]
_SLOT: Final = HopMessage(
    type=HopMessage.STATUS,
    status=Status.OK,
    reservation=Reservation(expire=2_000_000_000, addrs=[Multiaddr("/ip4/203.0.114.7/tcp/4001").to_bytes()]),
    limit=Limit(duration=60, data=1 << 20),
)
_CALL: Final = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=id_of(bytes(32)).to_bytes()))
_DIAL: Final = AutoNatMessage(type=AutoNatMessage.DIAL)
_DIAL.dial.peer.id = id_of(PEER.public).to_bytes()
_DIAL.dial.peer.addrs.append(Multiaddr("/ip4/192.0.2.1/tcp/4001").to_bytes())
_DIALLED: Final = AutoNatMessage(type=AutoNatMessage.DIAL_RESPONSE)
_DIALLED.dialResponse.status = AutoNatMessage.OK
_DIALLED.dialResponse.addr = Multiaddr("/ip4/192.0.2.7/tcp/4001").to_bytes()
_SELF: Final = Identify(
    protocol_version="ipfs/0.1.0",
    agent_version="fuzz",
    public_key=b"\x08\x01\x12\x20" + PEER.public,
    listen_addrs=[Multiaddr("/ip4/192.0.2.1/tcp/4001").to_bytes()],
    observed_addr=Multiaddr("/ip4/192.0.2.2/tcp/4001").to_bytes(),
    protocols=["/echo/kad/1.0.0", "/meshsub/1.1.0"],
    signedPeerRecord=b"record",
)
MULTISTREAM: Final = b"\x13/multistream/1.0.0\n"


def _said(*messages: Any) -> list[bytes]:
    return [_prefixed(each.SerializeToString()) for each in messages]


TARGETS: Final = [
    _stream(
        "gossip-stream",
        "echo_node.net.gossip.router.Gossip._read",
        _gossip,
        *GOSSIP,
        b"".join(GOSSIP),
        patient=True,  # a quiet neighbour is none the worse; Yamux ends a dead one
    ),
    _stream(
        "dht-stream", "echo_node.net.dht.kademlia.Dht._serve", lambda: _dht()._serve, *map(_prefixed, DHT)
    ),
    _stream("identify-push", "echo_node.net.host.HardHost._handle_push", _push, *_said(_SELF)),
    _stream("ping", "echo_node.net.identify.answer_pings", _ping, bytes(32), bytes(64)),
    _stream("relay-hop", "echo_node.net.reachability.relay.Relay._asked", _relay, *_said(*_HOPS)),
    _stream("relay-stop", "echo_node.net.reachability.circuit.Circuits._called", _circuit, *_said(_CALL)),
    _stream("autonat", "echo_node.net.reachability.autonat.AutoNat._asked", _autonat, *_said(_DIAL)),
    _stream(
        "question",
        "echo_node.net.request_response.RequestResponse._handle",
        _questions,
        framed(b"question"),
        framed(b""),
    ),
    _stream(
        "negotiation",
        "echo_node.net.host.HardHost._swarm_stream_handler",
        _negotiation,
        MULTISTREAM + b"\x11/ipfs/ping/1.0.0\n" + bytes(32),
        MULTISTREAM + b"\x03ls\n",
        MULTISTREAM + b"\x0e/ipfs/id/1.0.0\n",
        MULTISTREAM + _prefixed(PUSH.encode() + b"\n") + _said(_SELF)[0],
        MULTISTREAM + _prefixed(STOP.encode() + b"\n") + _said(_CALL)[0],
    ),
    _stream(
        "answer",
        "echo_node.net.request_response.RequestResponse.request",
        lambda: _answering(_ask),
        b"\0" + framed(b"answer"),
        b"\4" + framed(b"no"),
        b"\0" + framed(bytes(513)),
    ),
    _stream(
        "dht-answer",
        "echo_node.net.dht.kademlia.Dht._converse",
        lambda: _answering(_converse),
        *map(_prefixed, DHT),
    ),
    _stream(
        "relay-answer",
        "echo_node.net.reachability.circuit.Circuits.reserve",
        lambda: _answering(_reserve),
        *_said(_SLOT, HopMessage(type=HopMessage.STATUS, status=Status.RESERVATION_REFUSED)),
    ),
    _stream(
        "autonat-answer",
        "echo_node.net.reachability.autonat.AutoNat.ask",
        lambda: _answering(_dial_us),
        *_said(_DIALLED),
    ),
]
