"""Bulk port: serve large blob ranges over TLS 1.3, one token per connection.

`BlobServer` offers a token over the Noise stream; the fetcher dials this port and redeems it.
Addresses without a live token are closed before the handshake. Each connection runs in a thread
with a blocking socket and writes of 1 MiB, because that is what makes it fast.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from echo_node.errors import EchoError, PeerError, StoreError, boundary
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.bulk_sockets import normalise_address, run_with_socket, to_blocking
from echo_node.net.blobs.bulk_tls import server_tls
from echo_node.net.rate_limit import UploadLimit
from protocol import limits
from protocol.blob import BulkAsk, BulkOffer, bulk_pass
from protocol.digest import DIGEST_BYTES

if TYPE_CHECKING:
    from echo_node.net.base import Network

_log = logging.getLogger("echo_node.net.blobs.bulk_server")
BACKLOG: Final = 64
ACCEPT_PAUSE: Final = 0.1
"""Seconds to wait after a failed accept, as when no file descriptors are left."""
ANY_HOST: Final = "0.0.0.0"  # noqa: S104 - a connection without a token is closed at once


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """Limits of one bulk port."""

    valid: float = limits.BULK_SECONDS
    """Seconds in which a token has to be redeemed."""
    handshake: float = 5.0
    """Seconds from the connection to the redeemed token."""
    window: float = 20.0
    """Seconds in which the reader has to take 1 MiB: slower than 50 kB/s is cut off."""
    pending: int = 64
    """Connections that have not redeemed a token yet; for one more, the oldest of the busiest
    address is closed, if that has more than the address of the new one."""
    pending_each: int = 32
    """The same, from one address: several nodes may share one behind a NAT."""
    serving: int = 32
    """Connections that are being sent to; for one more, the oldest of the busiest address is ended,
    by the same rule."""
    serving_each: int = 8
    """The same, for one peer."""
    tokens: int = 256
    """Tokens that are issued and not redeemed."""
    tokens_each: int = 8
    """The same, for one peer."""
    tokens_address: int = 128
    """The same, for all peers of one address."""


class _RefusedError(PeerError):
    """A connection whose token is not valid."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """The ranges that a token is good for, and where their bytes come from."""

    peer: bytes
    address: str
    ask: BulkAsk
    registry: BlobRegistry
    uplink: UploadLimit
    until: float


@dataclass(eq=False, slots=True)
class _Visit:
    """A connection from an address, with its ticket once that is redeemed."""

    address: str
    ticket: _Ticket | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class BulkPort:
    """An open bulk port, shared by all blob servers of a node. `open_port` makes it."""

    def __init__(
        self,
        network: Network,
        listeners: Sequence[trio.socket.SocketType],
        allowed: BulkLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._listeners = listeners
        self._allowed = allowed
        self._clock = clock
        self._tickets: dict[bytes, _Ticket] = {}
        self._visits: list[_Visit] = []
        """Open connections, oldest first."""
        self._threads = trio.CapacityLimiter(allowed.pending + allowed.serving)
        self.port: int = listeners[0].getsockname()[1]
        self.counts: Counter[str] = Counter()
        """Connections by outcome: `served`, `stranger`, `crowded`, `refused`, `broken`, `shed`."""

    def offer(self, peer: bytes, ask: BulkAsk, registry: BlobRegistry, uplink: UploadLimit) -> BulkOffer:
        """Issue a one-use token for ranges of a registry to a directly connected peer."""
        address = self._network.address(peer)
        if address is None:
            raise PeerError("there is no direct connection to you")
        registry.check(ask.slices)
        now = self._clock()
        self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.until > now}
        own = sum(ticket.peer == peer for ticket in self._tickets.values())
        near = sum(ticket.address == normalise_address(address) for ticket in self._tickets.values())
        if (
            own >= self._allowed.tokens_each
            or near >= self._allowed.tokens_address
            or len(self._tickets) >= self._allowed.tokens
        ):
            raise PeerError("too many tokens are out")
        token = secrets.token_bytes(DIGEST_BYTES)
        until = now + self._allowed.valid
        self._tickets[bulk_pass(token, peer, ask)] = _Ticket(
            peer, normalise_address(address), ask, registry, uplink, until
        )
        return BulkOffer(pin=server_tls().pin, port=self.port, seconds=int(self._allowed.valid), token=token)

    async def run(self) -> None:
        """Accept connections until cancelled."""
        async with trio.open_nursery() as nursery:
            for listener in self._listeners:
                nursery.start_soon(self._accept, listener, nursery)

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                connection, (host, *_) = await listener.accept()
            except OSError as error:
                _log.warning("bulk port: accept failed: %s", error)
                await trio.sleep(ACCEPT_PAUSE)
                continue
            address = normalise_address(host)
            if (refusal := self._refusal(address)) is not None:
                self.counts[refusal] += 1
                connection.close()
                continue
            visit = _Visit(address)
            self._visits.append(visit)
            nursery.start_soon(self._handle, connection, visit)

    def _refusal(self, address: str) -> str | None:
        """Why a connection from an address is closed before the handshake, if it is."""
        now = self._clock()
        if not any(ticket.address == address and ticket.until > now for ticket in self._tickets.values()):
            return "stranger"
        pending = [each for each in self._visits if each.ticket is None and not each.scope.cancel_called]
        if sum(each.address == address for each in pending) >= self._allowed.pending_each:
            return "crowded"
        if len(pending) >= self._allowed.pending and not self._shed(pending, address):
            return "crowded"
        return None

    def _shed(self, visits: Sequence[_Visit], address: str) -> bool:
        """End the oldest connection of the busiest address for one of another.

        Return whether one was ended.
        """
        crowds = Counter(each.address for each in visits)
        busiest, most = crowds.most_common(1)[0]
        if most <= crowds[address] + 1:
            return False
        next(each for each in visits if each.address == busiest).scope.cancel()
        self.counts["shed"] += 1
        return True

    async def _handle(self, connection: trio.socket.SocketType, visit: _Visit) -> None:
        plain = to_blocking(connection, self._allowed.handshake)
        try:
            with boundary(PeerError, f"serving {visit.address} at the bulk port"), visit.scope:
                await run_with_socket(plain, lambda: self._serve(plain, visit), self._threads)
            self.counts["served"] += not visit.scope.cancelled_caught
        except _RefusedError as error:
            self.counts["refused"] += 1
            _log.info("%s", error)
        except EchoError as error:
            self.counts["broken"] += 1
            _log.info("%s", error)
        finally:
            self._visits.remove(visit)

    def _redeem(self, shown: bytes, visit: _Visit) -> _Ticket:
        """Return the ticket of a pass, which is spent by this."""
        ticket = self._tickets.pop(shown, None)
        if ticket is None or ticket.until <= self._clock():
            raise _RefusedError(f"{visit.address} showed a token that is used, expired or unknown")
        if ticket.address != visit.address:
            raise _RefusedError(f"{visit.address} showed a token for {ticket.address}")
        served = [each for each in self._visits if each.ticket and not each.scope.cancel_called]
        if (
            sum(each.ticket.peer == ticket.peer for each in served if each.ticket)
            >= self._allowed.serving_each
        ):
            raise _RefusedError(f"{visit.address} refused: its peer is being served on enough connections")
        if len(served) >= self._allowed.serving and not self._shed(served, visit.address):
            raise _RefusedError(f"{visit.address} refused: {len(served)} connections are being served")
        visit.ticket = ticket
        return ticket

    @property
    def pending(self) -> int:
        """Connections that have not redeemed a token yet."""
        return sum(each.ticket is None for each in self._visits)

    @property
    def serving(self) -> int:
        """Connections that are being sent to."""
        return len(self._visits) - self.pending

    # These run in threads.

    def _serve(self, plain: socket.socket, visit: _Visit) -> None:
        deadline = time.monotonic() + self._allowed.handshake
        with server_tls().context.wrap_socket(plain, server_side=True) as connection:
            shown = _receive_pass(connection, deadline)
            ticket = trio.from_thread.run_sync(self._redeem, shown, visit)
            connection.settimeout(self._allowed.window)
            for window in ticket.registry.windows(ticket.ask.slices):
                if ticket.uplink.limited:
                    trio.from_thread.run(ticket.uplink.take, ticket.peer, len(window))
                self._send(connection, window)

    def _send(self, connection: ssl.SSLSocket, window: memoryview) -> None:
        deadline = time.monotonic() + self._allowed.window
        sent = 0
        while sent < len(window):
            sent += connection.send(window[sent:])
            if time.monotonic() > deadline:
                raise PeerError(f"{sent} bytes were taken in {self._allowed.window:g} s: too slow")


def _receive_pass(connection: ssl.SSLSocket, deadline: float) -> bytes:
    shown = b""
    while len(shown) < DIGEST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError("no token was shown in time")
        connection.settimeout(left)
        more = connection.recv(DIGEST_BYTES - len(shown))
        if not more:
            raise PeerError("the connection was closed before a token was shown")
        shown += more
    return shown


@asynccontextmanager
async def open_port(
    network: Network,
    hosts: Sequence[str] = (ANY_HOST,),
    *,
    ports: Sequence[int] = (0,),
    allowed: BulkLimits | None = None,
) -> AsyncGenerator[BulkPort]:
    """Open the first of some ports that is free on all hosts, while the context lasts.

    Port 0 is any free one. Raises `StoreError` if none can be opened.
    """
    with boundary(StoreError, "opening the bulk port", advice="choose another port, or 0 for any"):
        listeners = await _listen(hosts, ports)
    try:
        opened = BulkPort(network, listeners, allowed or BulkLimits())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened.run)
            yield opened
            nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.close()


async def _listen(hosts: Sequence[str], ports: Sequence[int]) -> list[trio.socket.SocketType]:
    """Listen on one port number on every host."""
    failure: OSError | None = None
    for port in ports:
        listeners: list[trio.socket.SocketType] = []
        try:
            for host in hosts:
                number = listeners[0].getsockname()[1] if listeners else port
                listeners.append(await _listen_on(host, number))
        except OSError as error:
            failure = error
            for listener in listeners:
                listener.close()
        else:
            return listeners
    raise failure or OSError("no address to listen on")


async def _listen_on(host: str, port: int) -> trio.socket.SocketType:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
