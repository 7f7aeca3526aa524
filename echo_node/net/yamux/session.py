"""Yamux session state: streams, limits, received frames and the send queue.

Sans I/O: bytes go in, bytes come out, and nothing waits. A protocol violation of the peer raises
`Violation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.errors import EchoError, PeerError
from echo_node.net.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER_BYTES,
    INITIAL_WINDOW,
    NOISE_PLAINTEXT,
    PAYLOAD,
    PING,
    RST,
    SYN,
    WINDOW,
    FrameCutter,
    Violation,
    pack,
)
from echo_node.net.yamux.stream import StreamOwner, YamuxStream

SMALLEST_FILLER: Final = 1024
"""Bytes. A frame is shortened to end with its Noise message, but not below this."""


class OverfullError(EchoError):
    """Our side reads too little of what a peer sends; the peer broke no rule."""


@dataclass(frozen=True)
class Limits:
    """Resource limits and timeouts of one connection."""

    inbound: int = 256
    """Open streams of the peer, accepted or not; more are reset."""
    outbound: int = 256
    """Open streams of ours; opening another waits."""
    window: int = 16 * 1024 * 1024
    """Most bytes of a stream's receive window, which starts at 256 KiB and grows while it is read
    fast."""
    growth: int = 32 * 1024 * 1024
    """Bytes by which all windows together may grow."""
    unread: int = 64 * 1024 * 1024
    """Bytes received and not read, over all streams."""
    late: int = 1024 * 1024
    """Bytes that the peer may send to closed streams, beyond those in flight when we reset them."""
    control: int = 64 * 1024
    """Bytes of replies that wait for the peer to read them."""
    batch: int = 4 * NOISE_PLAINTEXT
    """Bytes that are written at once."""
    open_seconds: float = 10
    ping_seconds: float = 20
    dead_seconds: float = 50
    linger_seconds: float = 60
    """Seconds that a stream that we closed, and that has no reader, waits for the peer's FIN."""
    goodbye_seconds: float = 1


class YamuxSession:
    """The streams of one connection (`owner`)."""

    def __init__(self, owner: StreamOwner, limits: Limits) -> None:
        self.limits = limits
        self.streams: dict[int, YamuxStream] = {}
        self.unaccepted: deque[YamuxStream] = deque()
        self.ended = False
        self.slots = trio.Semaphore(limits.outbound)
        """One for each stream of ours that may be open."""
        self.writer = trio.lowlevel.ParkingLot()
        """Parking place of the writer while there is nothing to send."""
        self.acceptors = trio.lowlevel.ParkingLot()
        """Parking place of the callers of `accept_stream`."""
        self._owner = owner
        self._initiator = owner.is_initiator
        self._next_id = 1 if self._initiator else 2
        self._last_inbound = 0
        self._inbound = 0
        self._control = bytearray()
        self._ready: deque[YamuxStream] = deque()
        self._current: tuple[YamuxStream | None, int] = (None, 0)
        self._late = limits.late
        self._unread = 0
        self._growth = limits.growth
        self.feed: Callable[[bytes], None] = FrameCutter(self).feed
        """Handle received bytes."""

    # -- for the connection

    def open(self) -> YamuxStream:
        """Open a stream. The caller holds a slot."""
        stream = YamuxStream(self._next_id, self, self._owner, outbound=True)
        self._next_id += 2
        self.streams[stream.stream_id] = stream
        self.queue_control(pack(WINDOW, SYN, stream.stream_id, 0))
        return stream

    @property
    def may_open(self) -> bool:
        return not self.ended and self._next_id < 2**32

    @property
    def has_something_to_send(self) -> bool:
        return bool(self._control) or bool(self._ready)

    def next_batch(self) -> bytes:
        """Return control frames, then one frame of each stream in turn, fitted to Noise."""
        parts: list[bytes | memoryview] = [bytes(self._control)]
        size = len(self._control)
        self._control.clear()
        while self._ready and size < self.limits.batch:
            stream = self._ready.popleft()
            stream.queued = False
            if not stream.wants_to_send:
                continue
            room = NOISE_PLAINTEXT - size % NOISE_PLAINTEXT - HEADER_BYTES
            header, data = stream.next_frame(room if room >= SMALLEST_FILLER else PAYLOAD)
            parts += header, data
            size += HEADER_BYTES + len(data)
            if stream.wants_to_send:
                self.queue_data(stream)
        return b"".join(parts)

    def sweep(self) -> None:
        """Reset streams that we closed long ago, without a reader or the peer's FIN."""
        before = trio.current_time() - self.limits.linger_seconds
        for stream in list(self.streams.values()):
            if stream.send_closed and stream.touched < before and not stream.has_reader:
                stream.abandon()

    def end(self, code: int) -> None:
        """End all streams, and queue GoAway as the last frame."""
        self._ready.clear()
        self.queue_control(pack(GO_AWAY, 0, 0, code))
        self.ended = True
        for stream in list(self.streams.values()):
            stream.end()
            self.forget(stream, in_flight=0)
        self.unaccepted.clear()
        self.acceptors.unpark_all()

    # -- for the streams

    def queue_control(self, frame: bytes) -> None:
        """Queue a frame without payload, ahead of all data."""
        if not self.ended:
            self._control += frame
            self.writer.unpark()

    def queue_data(self, stream: YamuxStream) -> None:
        """Queue a stream that has data to send and window for it."""
        if not stream.queued and not self.ended:
            stream.queued = True
            self._ready.append(stream)
            self.writer.unpark()

    def forget(self, stream: YamuxStream, *, in_flight: int) -> None:
        """Remove a finished stream, to which `in_flight` bytes may still be on their way."""
        if self.streams.pop(stream.stream_id, None) is None:
            return
        self._late += in_flight
        self._growth += stream.window - INITIAL_WINDOW
        if stream.outbound:
            self.slots.release()
        else:
            self._inbound -= 1

    def grant(self, window: int) -> int:
        """Return by how much a stream that is read fast may grow its window."""
        more = max(0, min(window, self.limits.window - window, self._growth))
        self._growth -= more
        return more

    def unread(self, change: int) -> None:
        """Change the number of unread bytes, which is bounded."""
        self._unread += change
        if self._unread > self.limits.unread:
            raise OverfullError(f"{self._unread} bytes wait to be read")

    # -- received frames

    def frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Handle a header."""
        if kind == PING:
            if flags & SYN:
                self._answer(pack(PING, ACK, 0, length))
            return
        if kind == GO_AWAY:
            raise PeerError(f"the peer closed the connection, code {length}")
        stream = self._opened(stream_id) if flags & SYN == 0 else self._take_in(stream_id, flags)
        if kind == DATA:
            self._expect(stream, length)
            self._current = stream, flags
        elif stream is not None:
            stream.widen(length)
            self._finish(stream, flags)

    def body(self, piece: memoryview) -> None:
        """Handle a part of a data frame's payload."""
        stream, _ = self._current
        if stream is not None and not stream.was_reset:
            stream.receive(piece)

    def body_end(self) -> None:
        """Handle the end of a data frame."""
        stream, flags = self._current
        self._current = None, 0
        if stream is not None and not stream.was_reset:
            self._finish(stream, flags)

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 == (0 if self._initiator else 1)

    def _opened(self, stream_id: int) -> YamuxStream | None:
        """Return a stream by id; None if it is over."""
        stream = self.streams.get(stream_id)
        last = self._last_inbound if self._is_theirs(stream_id) else self._next_id - 2
        if stream is None and not 0 < stream_id <= last:
            raise Violation(f"a frame for stream {stream_id}, which was never opened")
        return stream

    def _take_in(self, stream_id: int, flags: int) -> YamuxStream | None:
        """Accept a new stream of the peer; None if it is refused."""
        if stream_id in self.streams or not self._is_theirs(stream_id) or not stream_id:
            raise Violation(f"stream {stream_id} is not the peer's to open")
        self._last_inbound = max(self._last_inbound, stream_id)
        if flags & RST:
            return None
        if self._inbound >= self.limits.inbound:
            self._late += INITIAL_WINDOW
            self._answer(pack(WINDOW, RST, stream_id, 0))
            return None
        self._inbound += 1
        stream = self.streams[stream_id] = YamuxStream(stream_id, self, self._owner, outbound=False)
        self._answer(pack(WINDOW, ACK, stream_id, 0))
        self.unaccepted.append(stream)
        self.acceptors.unpark()
        return stream

    def _expect(self, stream: YamuxStream | None, length: int) -> None:
        if stream is not None:
            stream.expect(length)
            return
        self._late -= length
        if self._late < 0:
            raise Violation(f"{length} more bytes for a stream that is over")

    def _finish(self, stream: YamuxStream, flags: int) -> None:
        if flags & RST:
            if stream in self.unaccepted:
                self.unaccepted.remove(stream)
            stream.peer_reset()
        elif flags & FIN:
            stream.peer_closed()

    def _answer(self, frame: bytes) -> None:
        """Queue a reply, bounded, as a peer may never read the replies."""
        if len(self._control) > self.limits.control:
            raise Violation("it asks for answers and does not read them")
        self.queue_control(frame)
