"""Asking others whether they can dial us, and dialling those who ask: AutoNAT v1, `/libp2p/autonat/1.0.0`.

Whoever asks is dialled at the very IP address that its question came from, so the answer can be aimed at nobody
else; a handshake shows that it was the asker who picked up. What follows from the answers is for `reach` to say.
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
from echo_node.net.reaching import addresses
from echo_node.net.reaching.circuit import drop, read_message, write_message

if TYPE_CHECKING:
    from echo_node.net.host import HardHost

PROTOCOL: Final = TProtocol("/libp2p/autonat/1.0.0")
DIAL_SECONDS: Final = 5.0
"""For one dial: a firewall that drops is as clear an answer as one that refuses."""
PORTS: Final = 2
"""Ports of one asker that are tried; together with `DIAL_SECONDS` an answer takes no longer than `ASK_SECONDS`."""
ASK_SECONDS: Final = 15.0
ADDRESSES: Final = 8
WINDOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a node does for those who ask: a few packets each, and not many a minute."""

    at_once: int = 4
    in_a_minute: int = 30
    in_a_minute_per_network: int = 3
    """Of one IP address (one /64 of IPv6). A node asks once, again when in doubt, and then every few minutes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one peer found: dialled, not dialled, or None when it would not try. The address is the one it dialled."""

    dialled: bool | None
    address: Multiaddr | None = None


class AutoNat:
    """Both sides. It answers from the moment it is made."""

    def __init__(self, host: HardHost, bounds: Bounds | None = None) -> None:
        self._host = host
        self.bounds = bounds or Bounds()
        self._dials: deque[tuple[float, str]] = deque(maxlen=self.bounds.in_a_minute)
        self._under_way = 0
        host.set_stream_handler(PROTOCOL, self._asked)

    async def ask(self, peer: ID, own: Iterable[Multiaddr]) -> Verdict:
        """Have a peer that we are connected to dial us; what goes wrong on the way there is no verdict."""
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
        return _verdict(answer, {addresses.port_of(each) for each in offered})

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
        here = addresses.ip(remote[0]) if remote else None
        offered = [each for each in map(addresses.read, list(asker.addrs)[:ADDRESSES]) if each is not None]
        ports = list(dict.fromkeys(port for port in map(addresses.port_of, offered) if port))[:PORTS]
        if here is None or not ports or not self._may_dial(addresses.network(here)):
            return Message.E_DIAL_REFUSED, None
        self._under_way += 1
        try:
            for port in ports:
                target = addresses.tcp(here, port)  # the asker's own address, whichever it wrote
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
        """Whether this very peer answers there, on a connection of its own that is closed again at once."""
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
    said = answer.dialResponse
    if answer.type != Message.DIAL_RESPONSE or said.status not in {Message.OK, Message.E_DIAL_ERROR}:
        return Verdict(None)
    if said.status == Message.E_DIAL_ERROR:
        return Verdict(dialled=False)
    at = addresses.read(said.addr)
    # it may name its own host and nothing else of its choosing: the port is one that we offered
    return Verdict(
        dialled=True, address=addresses.bare(at) if at and addresses.port_of(at) in ports else None
    )
