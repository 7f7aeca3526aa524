"""Yamux: many streams over one secured connection, wire-compatible with every other libp2p, and bounded.

One task reads, one writes, one listens for silence; nobody else touches the connection. The reader never waits for the
writer, so two peers that both send cannot stop each other. Whatever a peer sends, the worst that happens is that its
connection ends: `why` says why, and `violation` is set if the peer broke the protocol. It does not know protocols,
swarms or scores.
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
from echo_node.net.muxing.core import Limits, OverfullError, YamuxCore
from echo_node.net.muxing.frames import (
    GONE_NORMALLY,
    INTERNAL_ERROR,
    PING,
    PROTOCOL_ERROR,
    SYN,
    Violation,
    pack,
)
from echo_node.net.muxing.stream import StreamOwner, YamuxStream

PROTOCOL_ID: Final = "/yamux/1.0.0"
LIMITS: Final = Limits()
SMALL_CHUNK: Final = 4096
_log = logging.getLogger("echo_node.net.muxing.yamux")


class Yamux(StreamOwner):
    """One connection. `start` runs it to its end and raises nothing."""

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
        """Why the connection ended; empty while it has not."""
        self.violation = ""
        """What the peer did that Yamux does not allow; empty if it did nothing."""
        self._initiator = secured_conn.is_initiator if is_initiator is None else is_initiator
        self._limits = limits
        self._core = YamuxCore(self, limits)
        self._ending = trio.Event()
        self._said_goodbye = trio.Event()
        self._heard = 0.0

    @property
    def is_initiator(self) -> bool:
        """Whether we dialled."""
        return self._initiator

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened now."""
        return self.event_started.is_set() and not self._ending.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether the connection below is closed too."""
        return self.event_closed.is_set()

    @property
    def open_streams(self) -> int:
        """How many streams there are, from either side."""
        return len(self._core.streams)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Where the peer is."""
        return self.secured_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The addresses that the connection uses."""
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()

    async def start(self) -> None:
        """Carry the streams until the connection ends."""
        if self.event_started.is_set():
            return
        self.event_started.set()
        self._heard = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for work in (self._read, self._write, self._listen_for_silence):
                    nursery.start_soon(self._contained, work)
                await self._ending.wait()
                with trio.move_on_after(self._limits.goodbye_seconds):
                    await self._said_goodbye.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._end("our node stopped")
            await self._shut()

    async def close(self) -> None:
        """Say goodbye, and return when the connection is closed."""
        self._end("we closed it")
        if not self.event_started.is_set():
            self.event_started.set()
            await self._shut()
        with trio.move_on_after(2 * self._limits.goodbye_seconds):
            await self.event_closed.wait()

    async def open_stream(self) -> YamuxStream:
        """A new stream of ours. Waits a while if too many are open."""
        with trio.move_on_after(self._limits.open_seconds) as scope:
            await self._core.slots.acquire()
        if scope.cancelled_caught:
            raise MuxedStreamError(f"{self._limits.outbound} streams to {self.peer_id} are open already")
        if not self._core.may_open:
            self._core.slots.release()
            raise MuxedConnUnavailable(f"the connection has ended: {self.why or 'it has no stream ids left'}")
        return self._core.open()

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened. Raises `MuxedConnUnavailable` when the connection has ended."""
        await trio.lowlevel.checkpoint()
        while not self._core.unaccepted:
            if self._ending.is_set():
                raise MuxedConnUnavailable(f"the connection has ended: {self.why}")
            await self._core.acceptors.park()
        return self._core.unaccepted.popleft()

    async def _contained(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the connection; whatever it raises is an end of the connection and no more."""
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
            self._heard = trio.current_time()
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
            self._said_goodbye.set()

    async def _write_batch(self, batch: bytes) -> None:
        with boundary(PeerError, f"writing to {self.peer_id}"), trio.fail_after(self._limits.dead_seconds):
            await self.secured_conn.write(batch)

    async def _listen_for_silence(self) -> None:
        """Ask a peer that says nothing whether it is there, and end the connection if it is not."""
        limits = self._limits
        asked = 0
        while True:
            quiet = trio.current_time() - self._heard
            if quiet >= limits.dead_seconds:
                raise PeerError(f"not a byte from {self.peer_id} for {quiet:.0f} s")
            if quiet < limits.ping_seconds:
                await trio.sleep(limits.ping_seconds - quiet)
            else:
                asked += 1
                self._core.queue_control(pack(PING, SYN, 0, asked % 2**32))
                await trio.sleep(min(limits.ping_seconds, limits.dead_seconds - quiet))
            self._core.sweep()

    def _end(self, why: str, code: int = GONE_NORMALLY) -> None:
        """Begin to end. The first reason counts."""
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
