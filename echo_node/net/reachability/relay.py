"""Circuit relay v2 service: bounded reservations and circuits.

A peer that holds a reservation can be called through this relay for as long as its own connection
stands. The relay copies ciphertext between two streams, which it cannot read.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import INetStream
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage

from echo_node.errors import PeerError, boundary
from echo_node.net.rate_limit import Throttle
from echo_node.net.reachability import multiaddrs
from echo_node.net.reachability.circuit import (
    ANSWER_SECONDS,
    HOP,
    PIECE,
    STOP,
    RelayError,
    drop,
    read_message,
    write_message,
)
from protocol.identity import PEER_ID_BYTES

if TYPE_CHECKING:
    from echo_node.net.host import HardHost

NAMED: Final = 4
"""Most addresses of the relay that a reservation names."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a relay.

    Counts and rates bind long before the totals do, as gossip and requests go on for hours.
    """

    slots: int = 128
    """Reservations. Each costs a connection of the host's 300, which it would have anyway, and some
    100 bytes."""
    slots_per_address: int = 8
    """Per IP address (per /64 of IPv6): enough for a house full of nodes, and no one peer gets
    all."""
    slot_seconds: int = 3_600
    """A reservation ends with its connection; the hour is for a peer that stays connected without
    need for it."""
    circuits: int = 64
    """Most circuits at once. Each may have a window of each muxer in memory on both sides, so this
    bounds the memory."""
    circuits_per_peer: int = 16
    """Most circuits per peer, calling or called: enough for a mesh, and a quarter of the relay."""
    circuit_seconds: int = 6 * 3_600
    circuit_bytes: int = 4 << 30
    """Most bytes of a circuit in both directions. A sampler moves some megabytes an hour;
    weights are not sent by relay."""
    circuit_rate: float = 2 << 20
    """Bytes per second of one circuit: a frame of weights in seconds, and useless as a free
    proxy."""
    rate: float = 8 << 20
    """Bytes per second of all circuits together: what a home line can give."""
    idle_seconds: float = 600.0
    """Seconds without a byte in either direction. Gossip has a heartbeat of a second, so such a
    circuit is unused."""
    linger_seconds: float = 10.0
    """Seconds for one direction to finish after the other has."""


class Relay:
    """The relay service, active from `start` to `stop`."""

    def __init__(self, host: HardHost, bounds: Bounds | None = None) -> None:
        self._host = host
        self.bounds = bounds or Bounds()
        self.slots: dict[ID, tuple[float, str]] = {}
        """Expiry (trio's clock) and network of each peer's reservation."""
        self._busy: Counter[ID] = Counter()
        self._circuits: set[trio.CancelScope] = set()
        self._all = Throttle(self.bounds.rate)
        self.serving = False

    def start(self) -> None:
        """Accept reservations and calls from now on."""
        self._host.set_stream_handler(HOP, self._asked)
        self.serving = True

    def stop(self) -> None:
        """Accept nothing more, and cut all circuits: their ends find another route."""
        if self.serving:
            self._host.remove_stream_handler(HOP)
        self.serving = False
        self.slots.clear()
        for scope in self._circuits:
            scope.cancel()

    @property
    def circuits(self) -> int:
        """Number of open circuits."""
        return len(self._circuits)

    async def _asked(self, stream: INetStream) -> None:
        question = await read_message(stream, HopMessage)
        try:
            await self._answer(stream, stream.muxed_conn.peer_id, question)
        except RelayError:
            self._host.counts["relay left alone"] += 1  # who asked has gone, which is no fault
            await drop(stream)

    async def _answer(self, stream: INetStream, peer: ID, question: HopMessage) -> None:
        if stream.get_remote_address() is None:
            await self._say(stream, Status.PERMISSION_DENIED)  # no circuits over circuits
        elif question.type == HopMessage.RESERVE:
            await self._reserve(stream, peer)
        elif question.type == HopMessage.CONNECT and len(question.peer.id) == PEER_ID_BYTES:
            await self._connect(stream, peer, ID(question.peer.id))
        else:
            await self._say(stream, Status.MALFORMED_MESSAGE)

    async def _say(self, stream: INetStream, status: Status.ValueType) -> None:
        self._host.counts[f"relay {Status.Name(status)}"] += 1
        await write_message(stream, HopMessage(type=HopMessage.STATUS, status=status))
        await stream.close()

    async def _reserve(self, stream: INetStream, peer: ID) -> None:
        remote = stream.get_remote_address()
        host = multiaddrs.ip(remote[0]) if remote else None
        network = multiaddrs.network(host) if host else ""
        if not self._has_room(peer, network):
            await self._say(stream, Status.RESERVATION_REFUSED)
            return
        self.slots[peer] = (trio.current_time() + self.bounds.slot_seconds, network)
        own = [each.to_bytes() for each in self._host.get_addrs() if not multiaddrs.is_circuit(each)]
        slot = Reservation(expire=int(time.time()) + self.bounds.slot_seconds, addrs=own[:NAMED])
        answer = HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=slot, limit=self._limit())
        await write_message(stream, answer)
        await stream.close()

    def _has_room(self, peer: ID, network: str) -> bool:
        if peer in self.slots:
            return True
        if len(self.slots) >= self.bounds.slots or self._from(network) >= self.bounds.slots_per_address:
            self.slots = {each: slot for each, slot in self.slots.items() if self._holds(each)}
        return len(self.slots) < self.bounds.slots and self._from(network) < self.bounds.slots_per_address

    def _from(self, network: str) -> int:
        return sum(slot[1] == network for slot in self.slots.values())

    def _holds(self, peer: ID) -> bool:
        return (
            peer in self.slots and trio.current_time() < self.slots[peer][0] and bool(self._host.direct(peer))
        )

    def _limit(self) -> Limit:
        return Limit(duration=self.bounds.circuit_seconds, data=self.bounds.circuit_bytes)

    async def _connect(self, stream: INetStream, caller: ID, target: ID) -> None:
        most = self.bounds.circuits_per_peer
        if caller == target or not self._holds(target):
            await self._say(stream, Status.NO_RESERVATION)
        elif (
            self.circuits >= self.bounds.circuits or self._busy[caller] >= most or self._busy[target] >= most
        ):
            await self._say(stream, Status.RESOURCE_LIMIT_EXCEEDED)
        else:
            with trio.CancelScope() as scope:
                self._circuits.add(scope)
                self._busy.update((caller, target))
                try:
                    await self._join(stream, caller, target)
                finally:
                    self._circuits.discard(scope)
                    self._busy.subtract((caller, target))
                    self._busy = +self._busy  # without those at zero
                    await drop(stream)

    async def _join(self, stream: INetStream, caller: ID, target: ID) -> None:
        try:
            onward = await self._call(caller, target)
        except PeerError:
            await self._say(stream, Status.CONNECTION_FAILED)
            return
        try:
            answer = HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=self._limit())
            await write_message(stream, answer)
            self._host.counts["circuits relayed"] += 1
            await self._carry(stream, onward)
        finally:
            await drop(onward)

    async def _call(self, caller: ID, target: ID) -> INetStream:
        with boundary(PeerError, f"calling {target}"), trio.fail_after(ANSWER_SECONDS):
            onward = await self._host.new_stream(target, [STOP])
        try:
            call = StopMessage(
                type=StopMessage.CONNECT, peer=PeerId(id=caller.to_bytes()), limit=self._limit()
            )
            await write_message(onward, call)
            answer = await read_message(onward, StopMessage)
        except BaseException:
            await drop(onward)
            raise
        if answer.type != StopMessage.STATUS or answer.status != Status.OK:
            await drop(onward)
            raise PeerError(f"{target} does not take the call")
        return onward

    async def _carry(self, one: INetStream, other: INetStream) -> None:
        """Copy both ways until both ends have closed, one breaks, or a limit is reached."""
        flow = _Flow(self.bounds, self._all)
        with trio.move_on_after(self.bounds.circuit_seconds):
            async with trio.open_nursery() as nursery:
                flow.scope = nursery.cancel_scope
                nursery.start_soon(flow.watch)
                nursery.start_soon(flow.pump, one, other)
                nursery.start_soon(flow.pump, other, one)
        self._host.counts["bytes relayed"] += flow.carried


class _Flow:
    """The byte flow of one circuit."""

    def __init__(self, bounds: Bounds, shared: Throttle) -> None:
        self._bounds = bounds
        self._shared = shared
        self._own = Throttle(bounds.circuit_rate)
        self._moved = trio.current_time()
        self._finished = 0
        self.carried = 0
        self.scope = trio.CancelScope()

    async def watch(self) -> None:
        """Cut a circuit on which nothing moves."""
        while trio.current_time() < self._moved + self._bounds.idle_seconds:  # noqa: ASYNC110 -- it is the clock
            await trio.sleep_until(self._moved + self._bounds.idle_seconds)
        self.scope.cancel()

    async def pump(self, source: INetStream, target: INetStream) -> None:
        """Copy one direction.

        When it closes, the other has `linger_seconds` left; when it breaks, both end.
        """
        try:
            while piece := await source.read(PIECE):
                self._moved = trio.current_time()
                self.carried += len(piece)
                if self.carried > self._bounds.circuit_bytes:
                    break
                await self._own.take(len(piece))
                await self._shared.take(len(piece))
                await target.write(piece)  # a reader that has stopped is found by `watch`
        except StreamEOF:
            await self._half_closed(target)
            return
        except IOException:
            pass
        self.scope.cancel()

    async def _half_closed(self, target: INetStream) -> None:
        self._finished += 1
        if self._finished == 1:
            try:
                await target.close_write()  # type: ignore[attr-defined]
            except IOException:
                self.scope.cancel()
            self.scope.deadline = trio.current_time() + self._bounds.linger_seconds
        else:
            self.scope.cancel()
