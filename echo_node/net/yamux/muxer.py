"""Yamux stream multiplexer over one secured connection, with bounded resources.

Wire-compatible with every other libp2p. One task reads, one writes, one sends keepalive pings;
nothing else touches the connection. The reader never waits for the writer, so two peers that both
send cannot deadlock. Whatever a peer sends, the worst that happens is that its connection ends:
`why` says why, and `violation` is set if the peer broke the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from multiaddr import Multiaddr

from echo_node.errors import DefectError, EchoError, PeerError, boundary
from echo_node.net.yamux.frames import (
    GONE_NORMALLY,
    INTERNAL_ERROR,
    PING,
    PROTOCOL_ERROR,
    SYN,
    Violation,
    pack,
)
from echo_node.net.yamux.session import Limits, OverfullError, YamuxSession
from echo_node.net.yamux.stream import StreamOwner, YamuxStream

PROTOCOL_ID: Final = "/yamux/1.0.0"
LIMITS: Final = Limits()
SMALL_CHUNK: Final = 4096
_log = logging.getLogger("echo_node.net.yamux.muxer")


class Yamux(StreamOwner):
    """One multiplexed connection. `start` runs it to its end and raises nothing."""

    def __init__(
        self,
        secured_conn: ISecureConn,
        peer_id: ID,
        is_initiator: bool | None = None,  # noqa: FBT001 - the library's own signature
        on_close: Callable[[], Awaitable[Any]] | None = None,
        *,
        limits: Limits = LIMITS,
    ) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.on_close = on_close
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.why = ""
        """Why the connection ended; empty while it is open."""
        self.violation = ""
        """Violation of the Yamux protocol by the peer; empty if there was none."""
        self._initiator = secured_conn.is_initiator if is_initiator is None else is_initiator
        self._limits = limits
        self._core = YamuxSession(self, limits)
        self._ending = trio.Event()
        self._goodbye_sent = trio.Event()
        self._last_received = 0.0

    @property
    def is_initiator(self) -> bool:
        """Return whether this node dialled."""
        return self._initiator

    @property
    def is_established(self) -> bool:
        """Return whether streams can be opened now."""
        return self.event_started.is_set() and not self._ending.is_set()

    @property
    def is_closed(self) -> bool:
        """Return whether the connection below is closed too."""
        return self.event_closed.is_set()

    @property
    def open_streams(self) -> int:
        """Number of open streams, from either side."""
        return len(self._core.streams)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the peer's IP address and port."""
        return self.secured_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the addresses of the connection below."""
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Return whether the connection is direct or relayed."""
        return self.secured_conn.get_connection_type()

    async def start(self) -> None:
        """Run the streams until the connection ends."""
        if self.event_started.is_set():
            return
        self.event_started.set()
        self._last_received = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for work in (self._read, self._write, self._keepalive):
                    nursery.start_soon(self._contained, work)
                await self._ending.wait()
                with trio.move_on_after(self._limits.goodbye_seconds):
                    await self._goodbye_sent.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._end("our node stopped")
            await self._shut()

    async def close(self) -> None:
        """Send GoAway, and return when the connection is closed."""
        self._end("we closed it")
        if not self.event_started.is_set():
            self.event_started.set()
            await self._shut()
        with trio.move_on_after(2 * self._limits.goodbye_seconds):
            await self.event_closed.wait()

    async def open_stream(self) -> YamuxStream:
        """Open a stream. Waits a while if too many are open."""
        with trio.move_on_after(self._limits.open_seconds) as scope:
            await self._core.slots.acquire()
        if scope.cancelled_caught:
            raise MuxedStreamError(f"{self._limits.outbound} streams to {self.peer_id} are open already")
        if not self._core.may_open:
            self._core.slots.release()
            raise MuxedConnUnavailable(f"the connection has ended: {self.why or 'it has no stream ids left'}")
        return self._core.open()

    async def accept_stream(self) -> YamuxStream:
        """Return the next stream that the peer opened.

        Raises `MuxedConnUnavailable` when the connection has ended.
        """
        await trio.lowlevel.checkpoint()
        while not self._core.unaccepted:
            if self._ending.is_set():
                raise MuxedConnUnavailable(f"the connection has ended: {self.why}")
            await self._core.acceptors.park()
        return self._core.unaccepted.popleft()

    async def _contained(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the connection; any error that it raises ends only the connection."""
        try:
            with boundary(DefectError, "carrying streams"):
                await work()
        except Violation as error:
            self.violation = error.what
            self._end(error.what, PROTOCOL_ERROR)
        except PeerError as error:
            self._end(error.what)
        except OverfullError as error:
            self._end(error.what, INTERNAL_ERROR)
        except DefectError as error:
            _log.exception("the connection to %s", self.peer_id)
            self._end(error.what, INTERNAL_ERROR)

    async def _read(self) -> None:
        while not self._ending.is_set():
            with boundary(PeerError, f"reading from {self.peer_id}"):
                chunk = await self.secured_conn.read()
            if not chunk:
                raise PeerError("the peer hung up")
            self._last_received = trio.current_time()
            self._core.feed(chunk)
            if (
                len(chunk) < SMALL_CHUNK
            ):  # thousands of these may be there at once, without a wait between them
                await trio.lowlevel.checkpoint()

    async def _write(self) -> None:
        try:
            while self._core.has_something_to_send or not self._ending.is_set():
                if self._core.has_something_to_send:
                    await self._write_batch(self._core.next_batch())
                else:
                    await self._core.writer.park()
        finally:
            self._goodbye_sent.set()

    async def _write_batch(self, batch: bytes) -> None:
        with boundary(PeerError, f"writing to {self.peer_id}"), trio.fail_after(self._limits.dead_seconds):
            await self.secured_conn.write(batch)

    async def _keepalive(self) -> None:
        """Ping a silent peer, and end the connection if it stays silent."""
        limits = self._limits
        pings = 0
        while True:
            quiet = trio.current_time() - self._last_received
            if quiet >= limits.dead_seconds:
                raise PeerError(f"not a byte from {self.peer_id} for {quiet:.0f} s")
            if quiet < limits.ping_seconds:
                await trio.sleep(limits.ping_seconds - quiet)
            else:
                pings += 1
                self._core.queue_control(pack(PING, SYN, 0, pings % 2**32))
                await trio.sleep(min(limits.ping_seconds, limits.dead_seconds - quiet))
            self._core.sweep()

    def _end(self, why: str, code: int = GONE_NORMALLY) -> None:
        """Begin to close the connection. The first reason is kept."""
        if not self._ending.is_set():
            self.why = why
            self._core.end(code)
            self._ending.set()

    async def _shut(self) -> None:
        try:
            with (
                boundary(PeerError, f"closing the connection to {self.peer_id}"),
                trio.CancelScope(shield=True, deadline=trio.current_time() + self._limits.goodbye_seconds),
            ):
                await self.secured_conn.close()
        except PeerError as error:
            _log.debug("%s", error)
        self.event_closed.set()
        if self.on_close is None:
            return
        try:
            with boundary(DefectError, "telling that a connection has ended"):
                await self.on_close()
        except (EchoError, ExceptionGroup):
            _log.exception("the connection to %s", self.peer_id)
