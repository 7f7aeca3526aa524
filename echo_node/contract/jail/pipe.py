"""Messages between the node and a jailed process: msgpack lists of plain values, each behind its length, bounded.

Nothing is ever unpickled, nobody waits longer than the caller allows. After a `PipeError` nothing more goes
through: the other side is gone, silent or talks nonsense. What the messages mean is none of this room's business.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Final

import msgpack

LONGEST: Final = 8 * 2**20
"""Bytes of one message, on either side."""

_LENGTH: Final = struct.Struct("<I")
_READ: Final = 2**16
_MOST_ITEMS: Final = 2**16  # of one list or map


class PipeError(Exception):
    """The other side talks nonsense."""


class PipeEndedError(PipeError):
    """The other side is gone."""


class PipeSilentError(PipeError):
    """The other side takes, or gives, nothing for too long."""


class Pipe:
    """One end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        self._end = end
        self._patience: float | None = None
        self._read = bytearray()

    def send(self, message: list[Any], seconds: float | None = None) -> None:
        """Send a message within so many seconds, or whenever it goes."""
        try:
            body: bytes = msgpack.packb(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise PipeError(f"a message that cannot be sent: {error}") from error
        if len(body) > LONGEST:
            raise PipeError(f"a message of {len(body)} bytes, where {LONGEST} are allowed")
        self._wait_at_most(seconds)
        try:
            self._end.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise PipeSilentError("nothing could be sent for too long") from error
        except OSError as error:
            raise PipeEndedError("the pipe has ended") from error

    def receive(self, seconds: float | None = None) -> list[Any]:
        """The next message, all of it within so many seconds, or whenever it comes."""
        until = None if seconds is None else time.monotonic() + seconds
        self._wait_at_most(seconds)
        self._fill(_LENGTH.size, until)
        (length,) = _LENGTH.unpack_from(self._read)
        if not 1 <= length <= LONGEST:
            raise PipeError(f"a message of {length} bytes, where 1 to {LONGEST} are allowed")
        whole = _LENGTH.size + length
        self._fill(whole, until)
        body = bytes(self._read[_LENGTH.size : whole])
        del self._read[:whole]
        return _decode(body)

    def close(self) -> None:
        """Let go of this end. The other side sees that the pipe has ended."""
        self._end.close()

    def _fill(self, wanted: int, until: float | None) -> None:
        while len(self._read) < wanted:
            try:
                chunk = self._end.recv(_READ)
            except TimeoutError as error:
                raise PipeSilentError("nothing came for too long") from error
            except OSError as error:
                raise PipeEndedError("the pipe has ended") from error
            if not chunk:
                raise PipeEndedError("the pipe has ended")
            self._read += chunk
            if until is not None and len(self._read) < wanted:
                left = until - time.monotonic()
                if left <= 0:
                    raise PipeSilentError("a message came too slowly")
                self._wait_at_most(left)

    def _wait_at_most(self, seconds: float | None) -> None:
        if seconds != self._patience:  # a system call each time
            self._end.settimeout(seconds)
            self._patience = seconds


def _decode(body: bytes) -> list[Any]:
    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, max_array_len=_MOST_ITEMS, max_map_len=_MOST_ITEMS, max_ext_len=0
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise PipeError(f"a message that is no msgpack: {type(error).__name__}") from error
    if type(message) is not list or not message:
        raise PipeError("a message that is no list")
    return message
