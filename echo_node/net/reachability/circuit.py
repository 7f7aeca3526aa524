"""Client side of circuit relay v2: reservations, incoming and outgoing circuits.

A circuit is a pair of streams that a relay joins; Noise and Yamux run over it end to end, so that
the relay cannot read what it carries, and the swarm holds a connection like any other, marked as
relayed. The protocol is `/libp2p/circuit/relay/0.2.0`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import trio
from google.protobuf.message import Message
from libp2p.abc import IListener, INetStream, IRawConnection, ITransport
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import THandler, TProtocol
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction
from libp2p.relay.circuit_v2.pb.circuit_pb2 import OK, HopMessage, PeerId, Status, StopMessage
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from echo_node.errors import PeerError, boundary
from echo_node.net.reachability import multiaddrs as addresses

if TYPE_CHECKING:
    from echo_node.net.host import HardHost

HOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/stop")
MESSAGE_BYTES: Final = 4_096
"""Most bytes of a hop or stop message, by the specification."""
ANSWER_SECONDS: Final = 10.0
CALLS: Final = 32
"""Incoming circuits at once: each holds a stream of the relay, which has 64."""
ADDRESSES: Final = 2
"""Addresses of one relay that are advertised: the one that we dialled, and one that it names."""
SHORTEST_SECONDS, LONGEST_SECONDS = 60.0, 7_200.0
"""Bounds in seconds of a reservation, which expires by the relay's clock, which may be wrong."""
PIECE: Final = 65_536
M = TypeVar("M", bound=Message)


class RelayError(PeerError):
    """A failure of a relay or the peer behind it. `status` is its response, if any."""

    def __init__(self, what: str, *, advice: str = "", status: int = 0) -> None:
        super().__init__(what, advice=advice)
        self.status = status


@dataclass(frozen=True, slots=True)
class Slot:
    """A reservation at a relay, until a time of trio's clock."""

    relay: ID
    until: float
    addresses: tuple[Multiaddr, ...]


class CircuitConnection(RawConnection):
    """A stream through a relay in place of a socket."""

    def __init__(self, stream: INetStream, *, initiator: bool, address: Multiaddr) -> None:
        super().__init__(stream, initiator, ConnectionType.RELAYED, [address])

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` received bytes; none when the other end has closed."""
        try:
            return await self.stream.read(PIECE if n is None else n)
        except StreamEOF:
            return b""
        except IOException as error:
            raise ConnectionClosedError(f"the circuit broke: {error}", transport="p2p-circuit") from error

    async def write(self, data: bytes) -> None:
        """Send data."""
        try:
            await self.stream.write(data)
        except IOException as error:
            raise ConnectionClosedError(f"the circuit broke: {error}", transport="p2p-circuit") from error

    async def close(self) -> None:
        """Close our direction; the relay ends the other. Safe when a dial is cancelled."""
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await self.stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return None: the socket is the relay's, and tells nothing about the peer."""
        return None


class Circuits(ITransport):
    """This node's reservations, and its incoming and outgoing circuits."""

    def __init__(self, host: HardHost) -> None:
        self._host = host
        self.slots: dict[ID, Slot] = {}
        self._calls = 0
        host.set_stream_handler(STOP, self._called)

    def can_dial(self, maddr: Multiaddr) -> bool:
        """Return whether an address is that of a circuit, target included."""
        return addresses.circuit(maddr) is not None

    def can_listen(self, maddr: Multiaddr) -> bool:  # noqa: ARG002 -- the library's interface
        """Return False: `reserve` is how to listen."""
        return False

    def protocols(self) -> list[str]:
        """Return the protocol names that the transport manager looks for first."""
        return ["p2p-circuit"]

    def listen_order(self) -> int:
        """Return a rank before TCP, which takes a circuit for the relay's own address."""
        return -1

    def create_listener(self, handler_function: THandler) -> IListener:  # noqa: ARG002 -- the library's interface
        """Refuse: a circuit has no listener."""
        raise OpenConnectionError("a circuit has no listener")

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Dial a raw connection through the relay that the address names."""
        found = addresses.circuit(maddr)
        if found is None:
            raise OpenConnectionError(f"{maddr} is not the address of a circuit")
        relay, hints, target = found
        if relay == self._host.get_id():
            raise OpenConnectionError(f"{target} has a slot here and is not connected")
        try:
            stream = await self._hop(relay, hints)
            try:
                await self._ask(
                    stream, HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=target.to_bytes()))
                )
            except BaseException:
                await drop(stream)
                raise
        except RelayError as error:
            raise OpenConnectionError(str(error)) from error
        return CircuitConnection(stream, initiator=True, address=maddr)

    async def reserve(self, relay: ID) -> Slot:
        """Reserve a slot at a connected relay, or renew it."""
        stream = await self._hop(relay, ())
        try:
            answer = await self._ask(stream, HopMessage(type=HopMessage.RESERVE))
        finally:
            await drop(stream)
        if not answer.HasField("reservation"):
            raise RelayError(f"{relay} gave a slot without saying until when")
        lasts = min(max(answer.reservation.expire - time.time(), SHORTEST_SECONDS), LONGEST_SECONDS)
        ways = self._ways(relay, list(answer.reservation.addrs)[:8])
        if not ways:
            raise RelayError(f"{relay} has no address that others could dial")
        self.slots[relay] = slot = Slot(relay, trio.current_time() + lasts, ways)
        return slot

    def _ways(self, relay: ID, named: list[bytes]) -> tuple[Multiaddr, ...]:
        """Return this node's circuit addresses, by the relay's known addresses."""
        ours = [
            address
            for conn in self._host.direct(relay)
            if getattr(conn, "direction", None) is Direction.OUTBOUND
            for address in conn.get_transport_addresses()
        ]
        suffix = Multiaddr(f"/p2p/{relay}/p2p-circuit")
        advertised = [
            each for each in map(addresses.read, named) if each is not None and _is_for_others(each)
        ]
        theirs = self._host.admit_own(relay, advertised)
        unique = {str(each): each for each in [*ours, *theirs]}
        return tuple(each.encapsulate(suffix) for each in list(unique.values())[:ADDRESSES])

    async def _hop(self, relay: ID, hints: tuple[Multiaddr, ...]) -> INetStream:
        """Open a hop stream on a direct connection to the relay."""
        with boundary(RelayError, f"reaching the relay {relay}"), trio.fail_after(ANSWER_SECONDS):
            await self._host.swarm.dial_direct(relay, hints)
            return await self._host.new_stream(relay, [HOP])

    async def _ask(self, stream: INetStream, question: HopMessage) -> HopMessage:
        await write_message(stream, question)
        answer = await read_message(stream, HopMessage)
        if answer.type != HopMessage.STATUS or answer.status != OK:
            status_name = (
                Status.Name(answer.status) if answer.status in Status.values() else str(answer.status)
            )
            raise RelayError(f"{stream.muxed_conn.peer_id} refused: {status_name}", status=answer.status)
        return answer

    async def _called(self, stream: INetStream) -> None:
        """Handle an incoming circuit; return when its connection has ended."""
        relay = stream.muxed_conn.peer_id
        call = await read_message(stream, StopMessage)
        try:
            taken = await self._take(stream, relay, call)
        except RelayError:
            taken = False  # it left before it had the answer, which is no fault
        if not taken:
            await drop(stream)
            return
        address = Multiaddr(f"/p2p/{relay}/p2p-circuit")
        self._calls += 1
        try:
            connection = CircuitConnection(stream, initiator=False, address=address)
            await self._host.swarm.upgrade_inbound_raw_conn(connection, address)
        except SwarmException:
            self._host.counts["circuits ended"] += 1
        finally:
            self._calls -= 1
            await drop(stream)

    async def _take(self, stream: INetStream, relay: ID, call: StopMessage) -> bool:
        refusal = None
        if call.type != StopMessage.CONNECT or not call.HasField("peer"):
            refusal = Status.MALFORMED_MESSAGE
        elif relay not in self.slots:
            refusal = Status.PERMISSION_DENIED  # only a relay that we chose may bring us callers
        elif self._calls >= CALLS:
            refusal = Status.RESOURCE_LIMIT_EXCEEDED
        await write_message(stream, StopMessage(type=StopMessage.STATUS, status=refusal or Status.OK))
        if refusal is not None:
            await stream.close()
        return refusal is None


async def read_message(stream: INetStream, kind: type[M], *, seconds: float = ANSWER_SECONDS) -> M:
    """Read one message of this type, or raise `RelayError`."""
    with boundary(RelayError, f"reading from {stream.muxed_conn.peer_id}"), trio.fail_after(seconds):
        message = kind()
        message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, MESSAGE_BYTES))
        return message


async def write_message(stream: INetStream, message: Message) -> None:
    """Write one message, or raise `RelayError`."""
    with boundary(RelayError, f"writing to {stream.muxed_conn.peer_id}"), trio.fail_after(ANSWER_SECONDS):
        await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def drop(stream: INetStream) -> None:
    """Reset a stream in any state, even when cancelled."""
    with trio.CancelScope(shield=True), trio.move_on_after(1):
        await stream.reset()


def _is_for_others(address: Multiaddr) -> bool:
    host = addresses.ip_of(address)
    return (
        host is not None
        and addresses.port_of(address) is not None
        and not (host.is_loopback or host.is_unspecified)
    )
