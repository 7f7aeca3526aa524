"""The frames of Yamux: a header of twelve bytes, and for data the bytes that follow it.

This is the wire and nothing more: it packs headers, and cuts what arrives, however it was split, into frames. It does
not know streams, windows or connections, and it never holds more than one unfinished header.
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
"""What fits one Noise message: 65,535 less a tag of 16."""
PAYLOAD: Final = NOISE_PLAINTEXT - HEADER_BYTES
"""The most data in one frame of ours, so that a frame is one Noise message."""
INITIAL_WINDOW: Final = 256 * 1024
LARGEST_WINDOW: Final = 2**32 - 1


class Violation(PeerError):  # noqa: N818 - it names what was done
    """The peer did what Yamux does not allow. Its connection ends."""


class FrameSink(Protocol):
    """Whoever is told of frames as they are cut."""

    def frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """A header. For `DATA`, `length` bytes follow through `body`, and then `body_end`."""

    def body(self, piece: memoryview) -> None:
        """Some of the data of the frame that was announced last."""

    def body_end(self) -> None:
        """All the data of that frame have come. Called for empty data frames too."""


class FrameCutter:
    """Cuts arriving chunks into frames for one sink. Raises `Violation` for what is no frame."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._header = b""
        self._body_left = 0

    def feed(self, chunk: bytes) -> None:
        """Take what has arrived; frames may begin and end anywhere in it."""
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
    """The header of a frame."""
    return HEADER.pack(0, kind, flags, stream_id, length)
