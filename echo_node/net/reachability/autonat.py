"""AutoNAT v1 (`/libp2p/autonat/1.0.0`): dial-back client and server.

A requester is dialled at the very IP address that its request came from, so that the dial cannot
be aimed at a third party; a handshake shows that it was the requester who answered. `reachability`
draws the conclusions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from echo_node.errors import PeerError, boundary
from echo_node.net.discovery.address_door import port_may_be_dialled
from echo_node.net.discovery.address_scope import Scope, scope_of_ip
from echo_node.net.reachability import multiaddrs
from echo_node.net.reachability.circuit import drop, read_message, write_message

if TYPE_CHECKING:
    from echo_node.net.host import HardHost

PROTOCOL: Final = TProtocol("/libp2p/autonat/1.0.0")
DIAL_SECONDS: Final = 5.0
"""Seconds for one dial: a firewall that drops is as clear an answer as one that refuses."""
PORTS: Final = 2
"""Ports of one requester that are tried; with `DIAL_SECONDS`, a response takes less than
`ASK_SECONDS`."""
ASK_SECONDS: Final = 15.0
ADDRESSES: Final = 8
WINDOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the dials that a node makes for others."""

    at_once: int = 4
    in_a_minute: int = 30
    in_a_minute_per_network: int = 3
    """Per IP address (per /64 of IPv6). A node asks once, again when in doubt, then every few
    minutes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One peer's result: dialled, failed, or None when it did not try.

    `address` is the address that it dialled.
    """

    dialled: bool | None
    address: Multiaddr | None = None


class AutoNat:
    """AutoNAT client and server. It serves from the moment it is made."""

    def __init__(self, host: HardHost, bounds: Bounds | None = None) -> None:
        self._host = host
        self.bounds = bounds or Bounds()
        self._dials: deque[tuple[float, str]] = deque(maxlen=self.bounds.in_a_minute)
        self._under_way = 0
        host.set_stream_handler(PROTOCOL, self._asked)

    async def ask(self, peer: ID, own: Iterable[Multiaddr]) -> Verdict:
        """Ask a connected peer to dial us; any failure of the request is no verdict."""
        question = Message(type=Message.DIAL)
        question.dial.peer.id = self._host.get_id().to_bytes()
        offered = list(own)[:ADDRESSES]
        question.dial.peer.addrs.extend(each.to_bytes() for each in offered)
        if not self._host.direct(peer):
            return Verdict(None)
        try:
            with boundary(PeerError, f"asking {peer} to dial us"), trio.fail_after(ASK_SECONDS):
                stream = await self._host.new_stream(peer, [PROTOCOL])
                try:
                    await write_message(stream, question)
                    answer = await read_message(stream, Message, seconds=ASK_SECONDS)
                finally:
                    await drop(stream)
        except PeerError:
            return Verdict(None)
        return _verdict(answer, {multiaddrs.port_of(each) for each in offered})

    async def _asked(self, stream: INetStream) -> None:
        question = await read_message(stream, Message)
        answer = Message(type=Message.DIAL_RESPONSE)
        answer.dialResponse.status, dialled = await self._answer(stream, question)
        if dialled is not None:
            answer.dialResponse.addr = dialled.to_bytes()
        self._host.counts[f"autonat {Message.ResponseStatus.Name(answer.dialResponse.status)}"] += 1
        await write_message(stream, answer)
        await stream.close()

    async def _answer(
        self, stream: INetStream, question: Message
    ) -> tuple[Message.ResponseStatus.ValueType, Multiaddr | None]:
        peer = stream.muxed_conn.peer_id
        asker = question.dial.peer
        if question.type != Message.DIAL or (asker.id and asker.id != peer.to_bytes()):
            return Message.E_BAD_REQUEST, None
        remote = stream.get_remote_address()  # none on a circuit
        here = multiaddrs.ip(remote[0]) if remote else None
        offered = [each for each in map(multiaddrs.read, list(asker.addrs)[:ADDRESSES]) if each is not None]
        named = dict.fromkeys(port for port in map(multiaddrs.port_of, offered) if port)
        ports = [port for port in named if port_may_be_dialled(port)][:PORTS]
        known = here is not None and scope_of_ip(str(here)) is not Scope.NOWHERE
        if here is None or not known or not ports or not self._may_dial(multiaddrs.network(here)):
            return Message.E_DIAL_REFUSED, None
        self._under_way += 1
        try:
            for port in ports:
                target = multiaddrs.tcp(here, port)  # the asker's own address, whichever it wrote
                if await self._dials_through(target, peer):
                    return Message.OK, target
        finally:
            self._under_way -= 1
        return Message.E_DIAL_ERROR, None

    def _may_dial(self, network: str) -> bool:
        now = trio.current_time()
        recent = [where for when, where in self._dials if when > now - WINDOW_SECONDS]
        if (
            self._under_way >= self.bounds.at_once
            or len(recent) >= self.bounds.in_a_minute
            or recent.count(network) >= self.bounds.in_a_minute_per_network
        ):
            return False
        self._dials.append((now, network))
        return True

    async def _dials_through(self, target: Multiaddr, peer: ID) -> bool:
        """Return whether this peer answers at an address, on a connection closed at once."""
        try:
            with boundary(PeerError, f"dialling {target}"), trio.fail_after(DIAL_SECONDS):
                raw = await TCP().dial(target)
                try:
                    await self._host.swarm.upgrader.upgrade_security(raw, True, peer)  # noqa: FBT003 -- the library's
                finally:
                    with trio.CancelScope(shield=True), trio.move_on_after(1):
                        await raw.close()
        except PeerError:
            return False
        return True


def _verdict(answer: Message, ports: set[int | None]) -> Verdict:
    response = answer.dialResponse
    if answer.type != Message.DIAL_RESPONSE or response.status not in {Message.OK, Message.E_DIAL_ERROR}:
        return Verdict(None)
    if response.status == Message.E_DIAL_ERROR:
        return Verdict(dialled=False)
    at = multiaddrs.read(response.addr)
    # The peer may choose the IP address only: the port must be one that we offered.
    return Verdict(
        dialled=True, address=multiaddrs.bare(at) if at and multiaddrs.port_of(at) in ports else None
    )
