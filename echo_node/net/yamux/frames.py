"""Yamux frames: a header of twelve bytes, followed by the payload of data frames.

Packs headers, and splits arriving chunks into frames. At most one incomplete header is buffered.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

from echo_node.errors import PeerError

DATA: Final = 0
WINDOW: Final = 1
PING: Final = 2
GO_AWAY: Final = 3

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8

GONE_NORMALLY: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2

HEADER: Final = struct.Struct("!BBHII")
HEADER_BYTES: Final = HEADER.size
NOISE_PLAINTEXT: Final = 65_519
"""Bytes that fit into one Noise message: 65,535 less a tag of 16."""
PAYLOAD: Final = NOISE_PLAINTEXT - HEADER_BYTES
"""Most payload bytes of a frame that we send, so that a frame fits one Noise message."""
INITIAL_WINDOW: Final = 256 * 1024
LARGEST_WINDOW: Final = 2**32 - 1


class Violation(PeerError):  # noqa: N818 - it names what was done
    """A violation of the Yamux protocol by the peer, for which its connection ends."""


class FrameSink(Protocol):
    """Receiver of the frames that a `FrameCutter` parses."""

    def frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Handle a header. For `DATA`, `length` bytes follow by `body`, then `body_end`."""

    def body(self, piece: memoryview) -> None:
        """Handle a part of the payload of the last data frame."""

    def body_end(self) -> None:
        """Handle the end of a data frame's payload. Called for empty data frames too."""


class FrameCutter:
    """Splits chunks into frames for one sink; raises `Violation` on bad frames."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._header = b""
        self._body_left = 0

    def feed(self, chunk: bytes) -> None:
        """Parse a received chunk; frames may begin and end anywhere in it."""
        view = memoryview(chunk)
        at, end = 0, len(view)
        while at < end:
            if self._body_left:
                size = min(self._body_left, end - at)
                self._sink.body(view[at : at + size])
                at += size
                self._body_left -= size
                if not self._body_left:
                    self._sink.body_end()
                continue
            size = min(HEADER_BYTES - len(self._header), end - at)
            header = self._header + view[at : at + size]
            at += size
            if len(header) < HEADER_BYTES:
                self._header = header
                return
            self._header = b""
            self._begin(header)

    def _begin(self, header: bytes) -> None:
        version, kind, flags, stream_id, length = HEADER.unpack(header)
        if version != 0 or kind > GO_AWAY or flags & ~(SYN | ACK | FIN | RST):
            raise Violation(f"no Yamux frame: version {version}, type {kind}, flags {flags:#x}")
        self._sink.frame(kind, flags, stream_id, length)
        if kind == DATA:
            self._body_left = length
            if not length:
                self._sink.body_end()


def pack(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Pack the header of a frame."""
    return HEADER.pack(0, kind, flags, stream_id, length)
