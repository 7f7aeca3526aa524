"""Streams and connections in memory, whose other end is a fuzzer's; no more bytes ever come.

The first byte of an input says how: whether the peer hangs up afterwards or falls silent, and in
which pieces it arrives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.stream.exceptions import StreamEOF, StreamReset

from echo_node.net.swarm import id_of
from protocol import Identity

ME, PEER = Identity(b"m" * 32), Identity(b"p" * 32)
PIECES: Final = (1 << 20, 1, 3, 61)
MOST_WRITTEN: Final = 64 * 2**20


class Wire:
    """A libp2p stream, or a connection below one."""

    is_initiator = False

    def __init__(self, data: bytes, *, peer: bytes = PEER.public, first: bytes = b"") -> None:
        """`first` comes before the input, in one piece."""
        how = data[0] if data else 0
        self._silent = bool(how & 1)
        self._piece = PIECES[how >> 1 & 3]
        self._data = memoryview(data)[1:]
        self._first = first
        self._ended = False
        self.muxed_conn: Any = SimpleNamespace(peer_id=id_of(peer))
        self.written = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._ended:
            raise StreamReset("it was reset")
        if self._first:
            size = len(self._first) if n is None else n
            found, self._first = self._first[:size], self._first[size:]
            return found
        if not self._data:
            if self._silent:
                await trio.sleep_forever()
            return self.at_end()
        size = min(self._piece, len(self._data) if n is None else n)
        found, self._data = bytes(self._data[:size]), self._data[size:]
        return found

    def at_end(self) -> bytes:
        raise StreamEOF("the other end has closed")

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._ended:
            raise StreamReset("it was reset")
        self.written += data
        if len(self.written) > MOST_WRITTEN:
            raise AssertionError("one input made it write without end")

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    close_write = close

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self._ended = True

    def get_remote_address(self) -> tuple[str, int]:
        return "192.0.2.1", 4001

    def get_transport_addresses(self) -> list[Any]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT

    def get_protocol(self) -> str:
        return "/fuzz"

    def set_protocol(self, _protocol: str) -> None:
        pass


class RawWire(Wire):
    """A connection below Noise: its end is empty bytes, not an error."""

    def at_end(self) -> bytes:
        return b""


def framed(data: bytes) -> bytes:
    """As a question travels."""
    return len(data).to_bytes(4) + data
