"""Messages between two processes over a pair of sockets: msgpack maps, each behind its length, of bounded size.

Plain types alone go through, nothing is ever unpickled, and nobody waits beyond what the caller allows. After a
`PipeError` nothing more goes through: the other side is gone, silent or talks nonsense. What the messages mean is
none of this room's business.
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

from echo_node.errors import EngineError

LONGEST: Final = 16 * 2**20
"""Bytes of one message, on either side."""

Message = dict[str, Any]
T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_MOST_ITEMS: Final = 2**16  # of one list or map
_MOST_WAITING: Final = 256  # messages that are taken in while this side is sending
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PipeError(EngineError):
    """The other side is gone, silent or talks nonsense."""


class PipeEndedError(PipeError):
    """The other side has closed the pipe, or is no more."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a pipe that goes both ways."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Pipe:
    """One end. A side that `drains` goes on taking messages in while it sends, so that two senders cannot lock."""

    def __init__(self, end: socket.socket, *, drains: bool = False) -> None:
        end.settimeout(0)
        self._end = end
        self._drains = drains
        self._sending = threading.Lock()
        self._inbox: deque[Message] = deque()
        self._length = bytearray(_LENGTH.size)
        self._body: bytearray | None = None
        self._filled = 0
        self._torn = False
        self.heard = time.monotonic()
        """When the last byte came in."""
        self.spoken = False
        """Whether any has."""

    def send(self, message: Message, *, silent_seconds: float | None = None) -> None:
        """Send a message. If for so long no byte goes out and none comes in, the other side is silent."""
        frame = encode(message)
        with self._sending:
            self._push(frame, silent_seconds)

    def try_send(self, message: Message) -> bool:
        """Send a small message if that can be done at once."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if not _poll(self._end, select.POLLOUT, 0) & select.POLLOUT:
                return False
            self._push(encode(message), None)
            return True
        finally:
            self._sending.release()

    def receive(self, seconds: float | None) -> Message | None:
        """The next message; none, if it has not come by then. None seconds: as long as the pipe stands."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._inbox:
            if not self._take_in():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                _poll(self._end, select.POLLIN, left)
        return self._inbox.popleft()

    def ended(self, seconds: float = 0.0) -> bool:
        """Wait so long for the other side to go away. Whether it has; messages that lie there do not matter."""
        return bool(_poll(self._end, 0, seconds) & _GONE)

    def close(self) -> None:
        """Let go of this end. The other side sees that the pipe has ended."""
        self._end.close()

    def _push(self, frame: bytes, silent_seconds: float | None) -> None:
        if self._torn:
            raise PipeError("a message was cut off on its way")
        rest = memoryview(frame)
        moved = time.monotonic()
        self._torn = True  # until all of it is out, whatever interrupts us
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
                moved = time.monotonic()
            except BlockingIOError:
                self._wait_for_space(moved, silent_seconds)
            except OSError as error:
                raise PipeEndedError(f"the pipe has ended: {error.strerror}") from error
        self._torn = False

    def _wait_for_space(self, moved: float, silent_seconds: float | None) -> None:
        takes = self._drains and len(self._inbox) < _MOST_WAITING
        left = None
        if silent_seconds is not None:
            left = max(moved, self.heard) + silent_seconds - time.monotonic()
            if left <= 0:
                raise PipeError(f"nothing could be sent for {silent_seconds:g} seconds")
        ready = _poll(self._end, select.POLLOUT | (select.POLLIN if takes else 0), left)
        if takes and ready & select.POLLIN:
            self._take_in()

    def _take_in(self) -> bool:
        """Read what is there, up to the end of one message. Whether anything was."""
        target = memoryview(self._length if self._body is None else self._body)
        try:
            count = self._end.recv_into(target[self._filled :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PipeEndedError(f"the pipe has ended: {error.strerror}") from error
        if not count:
            within = (
                "in the middle of a message"
                if self._filled or self._body is not None
                else "by the other side"
            )
            raise PipeEndedError(f"the pipe was closed {within}")
        self.heard, self.spoken = time.monotonic(), True
        self._filled += count
        if self._filled == len(target):
            self._filled = 0
            if self._body is None:
                (length,) = _LENGTH.unpack(self._length)
                if not 1 <= length <= LONGEST:
                    raise PipeError(f"a message of {length} bytes, where 1 to {LONGEST} are allowed")
                self._body = bytearray(length)
            else:
                body, self._body = self._body, None
                self._inbox.append(decode(body))
        return True


def encode(message: Message) -> bytes:
    """A message as it goes through the pipe, length and all."""
    try:
        body: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"a message that cannot be sent: {error}") from error
    if len(body) > LONGEST:
        raise EngineError(f"a message of {len(body)} bytes, where {LONGEST} are allowed")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Message:
    """What came out of the pipe, without its length: a map of plain values that says its `kind`."""
    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, max_array_len=_MOST_ITEMS, max_map_len=_MOST_ITEMS, max_ext_len=0
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise PipeError(f"a message that is no msgpack: {type(error).__name__}") from error
    if type(message) is not dict or type(message.get("kind")) is not str:
        raise PipeError("a message that does not say its kind")
    _check_plain(message)
    return message


def field(message: Message, name: str, wanted: type[T]) -> T:
    """A field of a message, of exactly this type."""
    value = message.get(name)
    if type(value) is not wanted:
        kind = message["kind"]
        raise PipeError(
            f"a message {kind!r} whose {name!r} is a {type(value).__name__}, not a {wanted.__name__}"
        )
    return value


def _check_plain(message: Message) -> None:
    left: list[Any] = [message]
    while left:
        value = left.pop()
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                raise PipeError("a message with a key that is no text")
            left.extend(value.values())
        elif type(value) is list:
            left.extend(value)
        elif type(value) not in _PLAIN:
            raise PipeError(f"a message that holds a {type(value).__name__}")


def _poll(end: socket.socket, events: int, seconds: float | None) -> int:
    """What is the matter with a socket, once anything is; 0 if nothing was by then."""
    waiting = select.poll()
    waiting.register(end, events)
    found = waiting.poll(None if seconds is None else max(0.0, seconds * 1000))
    return found[0][1] if found else 0
