"""The door beside the connection, serving side: a port where TLS 1.3 is spoken and a token buys one answer.

Strangers are turned away by their address before the handshake; whoever is let in has to get on with it. Threads do
the work, with blocking sockets and large writes, because that is what makes it fast. It knows no download.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.errors import EchoError, PeerError, StoreError, boundary
from echo_node.net.base import Network
from echo_node.net.blobs.shelf import Shelf
from echo_node.net.blobs.sockets import blocking, plain_address, run_with_socket
from echo_node.net.blobs.tls import door
from echo_node.net.throttle import Uplink
from protocol import limits
from protocol.blob import BulkAsk, BulkOffer, bulk_pass
from protocol.digest import DIGEST_BYTES

_log = logging.getLogger("echo_node.net.blobs.bulk")
BACKLOG: Final = 64
ACCEPT_PAUSE: Final = 0.1
"""After a connection that could not be taken, as when there are no file descriptors left."""


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """What the door allows."""

    valid: float = limits.BULK_SECONDS
    """Seconds in which a token has to be used."""
    handshake: float = 5.0
    """Seconds from the connection to the pass."""
    window: float = 20.0
    """Seconds in which a window of 1 MiB has to be taken: slower than 50 kB a second is no bulk."""
    pending: int = 32
    """Connections that have not shown a pass yet."""
    pending_each: int = 8
    """The same, from one address."""
    serving: int = 16
    tokens: int = 256
    tokens_each: int = 8


class _RefusedError(PeerError):
    """Somebody at the door whose pass is not good."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    peer: bytes
    address: str
    ask: BulkAsk
    until: float


@dataclass(eq=False, slots=True)
class _Visit:
    """A connection from an address; what it is here for, once it has shown its pass."""

    address: str
    ticket: _Ticket | None = None


class BulkPort:
    """An open door. `open_port` makes it."""

    def __init__(
        self,
        network: Network,
        shelf: Shelf,
        uplink: Uplink,
        allowed: BulkLimits,
        listener: trio.socket.SocketType,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._shelf = shelf
        self._uplink = uplink
        self._allowed = allowed
        self._listener = listener
        self._clock = clock
        self._tickets: dict[bytes, _Ticket] = {}
        self._pending: Counter[str] = Counter()
        self._threads = trio.CapacityLimiter(allowed.pending + allowed.serving)
        self._serving = 0
        self.port: int = listener.getsockname()[1]
        self.counts: Counter[str] = Counter()
        """Connections by how they ended: `served`, `stranger`, `crowded`, `refused`, `broken`."""

    def offer(self, peer: bytes, ask: BulkAsk) -> BulkOffer:
        """A token for a peer and what it asks for. Refused to whom the door cannot be open."""
        address = self._network.address(peer)
        if address is None:
            raise PeerError("there is no direct connection to you")
        self._shelf.check(ask.slices)
        now = self._clock()
        self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.until > now}
        own = sum(ticket.peer == peer for ticket in self._tickets.values())
        if own >= self._allowed.tokens_each or len(self._tickets) >= self._allowed.tokens:
            raise PeerError("too many tokens are out")
        token = secrets.token_bytes(DIGEST_BYTES)
        until = now + self._allowed.valid
        self._tickets[bulk_pass(token, peer, ask)] = _Ticket(peer, plain_address(address), ask, until)
        return BulkOffer(pin=door().pin, port=self.port, seconds=int(self._allowed.valid), token=token)

    async def run(self) -> None:
        """Let people in until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection, (host, *_) = await self._listener.accept()
                except OSError as error:
                    _log.warning("a connection could not be taken: %s", error)
                    await trio.sleep(ACCEPT_PAUSE)
                    continue
                address = plain_address(host)
                if (refusal := self._turn_away(address)) is not None:
                    self.counts[refusal] += 1
                    connection.close()
                    continue
                self._pending[address] += 1
                nursery.start_soon(self._let_in, connection, _Visit(address))

    def _turn_away(self, address: str) -> str | None:
        now = self._clock()
        if not any(ticket.address == address and ticket.until > now for ticket in self._tickets.values()):
            return "stranger"
        allowed = self._allowed
        if self._pending.total() >= allowed.pending or self._pending[address] >= allowed.pending_each:
            return "crowded"
        return None

    async def _let_in(self, connection: trio.socket.SocketType, visit: _Visit) -> None:
        plain = blocking(connection, self._allowed.handshake)
        try:
            with boundary(PeerError, f"serving {visit.address} at the door"):
                await run_with_socket(plain, lambda: self._serve(plain, visit), self._threads)
            self.counts["served"] += 1
        except _RefusedError as error:
            self.counts["refused"] += 1
            _log.info("%s", error)
        except EchoError as error:
            self.counts["broken"] += 1
            _log.info("%s", error)
        finally:
            if visit.ticket is None:
                self._pending[visit.address] -= 1
            else:
                self._serving -= 1

    def _redeem(self, said: bytes, visit: _Visit) -> _Ticket:
        ticket = self._tickets.pop(said, None)
        if ticket is None or ticket.until <= self._clock():
            raise _RefusedError(f"{visit.address} showed a pass that is used, late, or none")
        if ticket.address != visit.address:
            raise _RefusedError(f"{visit.address} showed a pass for {ticket.address}")
        if self._serving >= self._allowed.serving:
            raise _RefusedError(f"{visit.address} came while {self._serving} others are being served")
        visit.ticket = ticket
        self._serving += 1
        self._pending[visit.address] -= 1
        return ticket

    # What follows runs in threads.

    def _serve(self, plain: socket.socket, visit: _Visit) -> None:
        deadline = time.monotonic() + self._allowed.handshake
        with door().context.wrap_socket(plain, server_side=True) as connection:
            said = _receive_pass(connection, deadline)
            ticket = trio.from_thread.run_sync(self._redeem, said, visit)
            connection.settimeout(self._allowed.window)
            for window in self._shelf.windows(ticket.ask.slices):
                if self._uplink.limited:
                    trio.from_thread.run(self._uplink.take, ticket.peer, len(window))
                self._send(connection, window)

    def _send(self, connection: ssl.SSLSocket, window: memoryview) -> None:
        deadline = time.monotonic() + self._allowed.window
        sent = 0
        while sent < len(window):
            sent += connection.send(window[sent:])
            if time.monotonic() > deadline:
                raise PeerError("it takes what it asked for too slowly")


def _receive_pass(connection: ssl.SSLSocket, deadline: float) -> bytes:
    said = b""
    while len(said) < DIGEST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError("it says nothing")
        connection.settimeout(left)
        more = connection.recv(DIGEST_BYTES - len(said))
        if not more:
            raise PeerError("it left before it had said anything")
        said += more
    return said


@asynccontextmanager
async def open_port(
    network: Network,
    shelf: Shelf,
    uplink: Uplink | None = None,
    *,
    host: str | None = None,
    port: int = 0,
    allowed: BulkLimits | None = None,
) -> AsyncGenerator[BulkPort]:
    """A door on every address of this machine, or on one, for as long as the context lasts."""
    with boundary(StoreError, "opening a port for large blobs", advice="choose another port, or 0 for any"):
        listener = await _listen(host, port)
    with listener:
        door()
        opened = BulkPort(network, shelf, uplink or Uplink(), allowed or BulkLimits(), listener)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened.run)
            yield opened
            nursery.cancel_scope.cancel()


async def _listen(host: str | None, port: int) -> trio.socket.SocketType:
    """One socket for IPv4 and IPv6, or for IPv4 alone where there is no other."""
    both = host is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (host and ":" in host) else socket.AF_INET
    listener = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        await listener.bind((host or ("::" if both else "0.0.0.0"), port))  # noqa: S104 - the door is for all who have a pass
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
