"""Length-prefixed msgpack messages between two processes over a socket pair.

The engine's process and the contract's jail both use it. A message is a map of plain values that
names its `kind`; nothing is unpickled, every length is bounded, every wait has a deadline. After a
`PipeError` the pipe is of no further use: the other side is gone, silent, or sends invalid bytes.
Imports neither numpy nor torch, so that a jailed process starts fast and small.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Final, TypeVar

import msgpack

from echo_node.errors import EchoError

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Default bound of one message's bytes, without its length prefix."""

Message = dict[str, Any]
T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_MAX_ITEMS: Final = 2**16  # items of one list or map
_MAX_INBOX: Final = 256  # messages received while this side is sending
_CLOSED_EVENTS: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PipeError(EchoError):
    """The other side is gone, silent, or sends invalid messages."""


class PipeEndedError(PipeError):
    """The other side closed the pipe or has exited."""


class PipeSilentError(PipeError):
    """The other side did not send or receive within the deadline."""


class MessageError(EchoError):
    """A message of our own that cannot be sent. The pipe stays usable."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a bidirectional pipe."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Pipe:
    """One end of a pipe.

    A side that `drains` keeps receiving while it sends, so that two senders cannot deadlock.
    """

    def __init__(
        self, end: socket.socket, *, drains: bool = False, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        end.settimeout(0)
        self._end = end
        self._drains = drains
        self._max_bytes = max_bytes
        self._send_lock = threading.Lock()
        self._inbox: deque[Message] = deque()
        self._length = bytearray(_LENGTH.size)
        self._body: bytearray | None = None
        self._filled = 0
        self._torn = False
        self.last_received = time.monotonic()
        """Monotonic time at which the last byte arrived; the creation time before the first."""
        self.received_any = False
        """Whether any byte has arrived."""

    def send(
        self, message: Message, *, seconds: float | None = None, silent_seconds: float | None = None
    ) -> None:
        """Send a message, or raise `PipeSilentError`.

        `seconds` bounds the whole message; `silent_seconds` bounds a stretch in which no byte goes
        out and none comes in. None means no bound.
        """
        frame = encode(message, self._max_bytes)
        with self._send_lock:
            self._push(frame, seconds, silent_seconds)

    def try_send(self, message: Message) -> bool:
        """Send a small message if that needs no waiting; return whether it was sent."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            if not _poll(self._end, select.POLLOUT, 0) & select.POLLOUT:
                return False
            self._push(encode(message, self._max_bytes), None, None)
            return True
        finally:
            self._send_lock.release()

    def receive(self, seconds: float | None) -> Message | None:
        """Return the next message, or None if it is not complete within `seconds`.

        None waits as long as the pipe stands; 0 reads what has already arrived. A message that
        trickles in is held to the same deadline as one that does not come.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not self._inbox:
            progress = self._receive_some()
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0 and not self._inbox and (seconds or not progress):
                return None
            if not progress:
                _poll(self._end, select.POLLIN, left)
        return self._inbox.popleft()

    def expect(self, seconds: float | None) -> Message:
        """Return the next message; raise `PipeSilentError` if incomplete in time."""
        message = self.receive(seconds)
        if message is None:
            raise PipeSilentError(f"no complete message came within {seconds:g} seconds")
        return message

    def ended(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for the other side to go; return whether it has.

        Messages that still wait to be read do not matter.
        """
        return bool(_poll(self._end, 0, seconds) & _CLOSED_EVENTS)

    def fileno(self) -> int:
        """Return this end's descriptor, for polling."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end. The other side sees that the pipe has ended."""
        self._end.close()

    def _push(self, frame: bytes, seconds: float | None, silent_seconds: float | None) -> None:
        if self._torn:
            raise PipeError("an earlier message was cut off while it was sent")
        rest = memoryview(frame)
        progressed = time.monotonic()
        until = None if seconds is None else progressed + seconds
        self._torn = True  # until all of it is out, whatever interrupts us
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
                progressed = time.monotonic()
            except BlockingIOError:
                self._wait_for_space(progressed, until, silent_seconds)
            except OSError as error:
                raise PipeEndedError(f"the pipe has ended: {error.strerror}") from error
        self._torn = False

    def _wait_for_space(self, progressed: float, until: float | None, silent_seconds: float | None) -> None:
        drains = self._drains and len(self._inbox) < _MAX_INBOX
        now = time.monotonic()
        waits: list[float] = []
        if until is not None:
            waits.append(until - now)
            if waits[-1] <= 0:
                raise PipeSilentError("the other side did not take a message in time")
        if silent_seconds is not None:
            waits.append(max(progressed, self.last_received) + silent_seconds - now)
            if waits[-1] <= 0:
                raise PipeSilentError(f"nothing could be sent for {silent_seconds:g} seconds")
        events = select.POLLOUT | (select.POLLIN if drains else 0)
        ready = _poll(self._end, events, min(waits, default=None))
        if drains and ready & select.POLLIN:
            self._receive_some()

    def _receive_some(self) -> bool:
        """Read available bytes, at most one message; return whether there were any."""
        target = memoryview(self._length if self._body is None else self._body)
        try:
            count = self._end.recv_into(target[self._filled :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PipeEndedError(f"the pipe has ended: {error.strerror}") from error
        if not count:
            where = (
                "in the middle of a message"
                if self._filled or self._body is not None
                else "by the other side"
            )
            raise PipeEndedError(f"the pipe was closed {where}")
        self.last_received, self.received_any = time.monotonic(), True
        self._filled += count
        if self._filled == len(target):
            self._filled = 0
            if self._body is None:
                (length,) = _LENGTH.unpack(self._length)
                if not 1 <= length <= self._max_bytes:
                    raise PipeError(f"a message of {length} bytes, where 1 to {self._max_bytes} are allowed")
                self._body = bytearray(length)
            else:
                body, self._body = self._body, None
                self._inbox.append(decode(body))
        return True


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return a message as bytes for the pipe, with its length prefix."""
    try:
        body: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"a message that cannot be sent: {error}") from error
    if len(body) > max_bytes:
        raise MessageError(f"a message of {len(body)} bytes, where {max_bytes} are allowed")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Message:
    """Return the message in `body`: a map of plain values with a `kind`.

    There is no length prefix.
    """
    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS, max_ext_len=0
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise PipeError(f"a message that is no msgpack: {type(error).__name__}") from error
    if type(message) is not dict or type(message.get("kind")) is not str:
        raise PipeError("a message that does not say its kind")
    _check_plain(message)
    return message


def field(message: Message, name: str, wanted: type[T]) -> T:
    """Return a field of a message; refuse one that is not of exactly this type."""
    value = message.get(name)
    if type(value) is not wanted:
        kind = message["kind"]
        raise PipeError(
            f"a message {kind!r} whose {name!r} is a {type(value).__name__}, not a {wanted.__name__}"
        )
    return value


def _check_plain(message: Message) -> None:
    unchecked: list[Any] = [message]
    while unchecked:
        value = unchecked.pop()
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                raise PipeError("a message with a key that is no text")
            unchecked.extend(value.values())
        elif type(value) is list:
            unchecked.extend(value)
        elif type(value) not in _PLAIN:
            raise PipeError(f"a message that holds a {type(value).__name__}")


def _poll(end: socket.socket, events: int, seconds: float | None) -> int:
    """Wait for events on a socket; return their mask, or 0 if none came in time."""
    poll = select.poll()
    poll.register(end, events)
    found = poll.poll(None if seconds is None else max(0.0, seconds * 1000))
    return found[0][1] if found else 0
