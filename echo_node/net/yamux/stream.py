"""One Yamux stream: receive buffer, outgoing data and flow-control windows.

The stream never waits for the socket: a writer waits until the connection has taken its bytes, so
that a cancelled writer leaves no half frame behind.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from types import TracebackType
from typing import Final, Protocol, Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import (
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from echo_node.net.yamux.frames import (
    DATA,
    FIN,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    RST,
    WINDOW,
    Violation,
    pack,
)
from echo_node.net.yamux.receive_buffer import ReceiveBuffer

GROW_SECONDS: Final = 0.5
"""Seconds. A reader that takes half of its window faster than this gets a larger one."""
_NOTHING: Final = memoryview(b"")


class StreamHome(Protocol):
    """Interface that a stream needs of its connection. No method waits."""

    def queue_control(self, frame: bytes) -> None: ...
    def queue_data(self, stream: YamuxStream) -> None: ...
    def forget(self, stream: YamuxStream, *, in_flight: int) -> None: ...
    def grant(self, window: int) -> int: ...
    def unread(self, change: int) -> None: ...


class StreamOwner(IMuxedConn):
    """The connection, as seen by the users of its streams."""

    @abstractmethod
    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the peer's IP address and port."""


class YamuxStream(IMuxedStream):
    """A bidirectional stream; each side is closed separately, and `close` closes ours."""

    def __init__(self, stream_id: int, home: StreamHome, owner: StreamOwner, *, outbound: bool) -> None:
        self.stream_id = stream_id
        self.muxed_conn = self._owner = owner
        self.outbound = outbound
        self.send_closed = False
        self.recv_closed = False
        self.was_reset = False
        self.queued = False
        """Whether the connection has this stream in its queue of streams that want to send."""
        self.touched = trio.current_time()
        self.window = INITIAL_WINDOW
        self._home = home
        self._inbox = ReceiveBuffer()
        self._whole = False  # the peer closed in order, and nothing that it sent was dropped
        self._counted = True  # the connection counts what is unread here
        self._credit = INITIAL_WINDOW  # what the peer may still send
        self._consumed = 0  # what was read and not yet granted again
        self._granted_at = self.touched
        self._send_window = INITIAL_WINDOW
        self._outgoing = _NOTHING
        self._one_writer = trio.Lock()
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._deadline = math.inf

    # -- for the user of the stream

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` bytes as soon as there are any; without `n`, all that arrived.

        Data that arrived before the peer closed or reset is returned first; then `MuxedStreamEOF`
        or `MuxedStreamReset` is raised.
        """
        await trio.lowlevel.checkpoint()
        if n == 0:
            return b""
        while not self._inbox.size:
            if self._whole:
                raise MuxedStreamEOF("the peer has closed its side")
            if self.was_reset:
                raise MuxedStreamReset("the stream was reset")
            await self._wait(self._readers)
        found = self._inbox.take(-1 if n is None else n)
        self._consume(len(found))
        return found

    async def write(self, data: bytes) -> None:
        """Write data; return when the connection has taken all of it.

        If cancelled, what the connection had not taken is not sent.
        """
        async with self._one_writer:
            self._check_writable()
            self._outgoing = memoryview(data).cast("B")
            try:
                while len(self._outgoing):
                    if self._send_window:
                        self._home.queue_data(self)
                    await self._wait(self._writers)
                    if len(self._outgoing):
                        self._check_writable()
            finally:
                self._outgoing = _NOTHING

    async def close(self) -> None:
        """Close our side: the peer reads what was written, then EOF. Its side stays open."""
        if not self.send_closed and not self.was_reset:
            self.send_closed = True
            self.touched = trio.current_time()
            self._home.queue_control(pack(WINDOW, FIN, self.stream_id, 0))
            self._writers.unpark_all()
            self._forget_if_over()
        await trio.lowlevel.checkpoint()

    close_write = close

    async def reset(self) -> None:
        """Reset both sides at once; unread and unsent data is lost."""
        self.abandon()
        await trio.lowlevel.checkpoint()

    def set_deadline(self, ttl: int) -> None:
        """Make reads and writes that still wait in `ttl` seconds fail."""
        if ttl < 0:
            raise ValueError(f"a deadline lies ahead, not at {ttl}")
        self._deadline = trio.current_time() + ttl

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the peer's IP address and port."""
        return self._owner.get_remote_address()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- for the connection

    @property
    def has_reader(self) -> bool:
        """Return whether a task waits for the peer's data."""
        return bool(self._readers)

    @property
    def wants_to_send(self) -> bool:
        """Return whether there is data to send and window left for it.

        A closed stream never has, though its writer may not have noticed yet.
        """
        return bool(self._send_window) and bool(len(self._outgoing)) and not self.send_closed

    def abandon(self) -> None:
        """Reset the stream without waiting."""
        if not self.was_reset and not (self.send_closed and self.recv_closed):
            self._home.queue_control(pack(WINDOW, RST, self.stream_id, 0))
            self._leave(in_flight=0 if self.recv_closed else self._credit)
        self.end()
        self._drop_unread()

    def next_frame(self, most: int) -> tuple[bytes, memoryview]:
        """Return the header and payload of the next frame of a stream that wants to send."""
        size = min(most, self._send_window, len(self._outgoing))
        piece = self._outgoing[:size]
        self._outgoing = self._outgoing[size:]
        self._send_window -= size
        if not len(self._outgoing):
            self._writers.unpark_all()
        return pack(DATA, 0, self.stream_id, size), piece

    def expect(self, length: int) -> None:
        """Take `length` announced bytes off the receive window, which they must fit."""
        if length > self._credit:
            raise Violation(f"{length} bytes for a stream that has room for {self._credit}")
        if self.recv_closed and length:
            raise Violation("data after the end of a stream")
        self._credit -= length

    def receive(self, piece: memoryview) -> None:
        self._inbox.put(piece)
        self._count(len(piece))
        self._readers.unpark_all()

    def widen(self, increment: int) -> None:
        """Add to the send window, as granted by the peer."""
        if self._send_window + increment > LARGEST_WINDOW:
            raise Violation(f"a window of {self._send_window} bytes and {increment} more")
        self._send_window += increment
        if self.wants_to_send:
            self._home.queue_data(self)

    def peer_closed(self) -> None:
        self.recv_closed = self._whole = True
        self._readers.unpark_all()
        self._forget_if_over()

    def peer_reset(self) -> None:
        """Handle the peer's reset.

        Data that arrived before stays readable, unless it is more than the initial window.
        """
        self._leave(in_flight=0)
        self.end()
        if self._inbox.size > INITIAL_WINDOW:
            self._drop_unread()

    def end(self) -> None:
        """Stop both directions. Data up to the peer's own FIN is still read in full."""
        self.was_reset = self.send_closed = True
        self._readers.unpark_all()
        self._writers.unpark_all()

    # -- inside

    async def _wait(self, lot: trio.lowlevel.ParkingLot) -> None:
        with trio.CancelScope(deadline=self._deadline) as scope:
            await lot.park()
        if scope.cancelled_caught:
            raise MuxedStreamError("the deadline of the stream has passed")

    def _check_writable(self) -> None:
        if self.was_reset:
            raise MuxedStreamReset("the stream was reset")
        if self.send_closed:
            raise MuxedStreamClosed("our side is closed")

    def _consume(self, size: int) -> None:
        self._count(-size)
        self._consumed += size
        if self.recv_closed or self.was_reset or 2 * self._consumed < self.window:
            return
        now = trio.current_time()
        if now - self._granted_at < GROW_SECONDS:
            more = self._home.grant(self.window)
            self.window += more
            self._consumed += more
        self._granted_at = self.touched = now
        self._credit += self._consumed
        self._home.queue_control(pack(WINDOW, 0, self.stream_id, self._consumed))
        self._consumed = 0

    def _forget_if_over(self) -> None:
        if self.send_closed and self.recv_closed:
            self._leave(in_flight=0)

    def _leave(self, *, in_flight: int) -> None:
        """Remove the stream from its connection; unread data lives as long as the stream."""
        self._count(-self._inbox.size)
        self._counted = False
        self._home.forget(self, in_flight=in_flight)

    def _drop_unread(self) -> None:
        if self._inbox.size:
            self._whole = False
            self._count(-self._inbox.size)
            self._inbox.clear()

    def _count(self, change: int) -> None:
        if self._counted:
            self._home.unread(change)
