"""Two ends of a connection for the tests of Yamux: ours, and ours, the library's or raw frames."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from trio.testing import memory_stream_pair

from echo_node.net.yamux.frames import DATA, HEADER, HEADER_BYTES, pack
from echo_node.net.yamux.muxer import LIMITS, Yamux

PEER = ID(b"peer")
BLOB = bytes(range(251)) * 20_000  # five megabytes, no two blocks of which look the same where frames are cut


class Pipe:
    """One end of a connection in memory, as the library's secured connections are."""

    def __init__(self, stream, *, is_initiator):
        self.stream = stream
        self.is_initiator = is_initiator
        self.closed = False

    async def read(self, n=None):
        return await self.stream.receive_some(n)

    async def write(self, data):
        await self.stream.send_all(data)

    async def close(self):
        self.closed = True
        await self.stream.aclose()

    def get_remote_address(self):
        return ("192.0.2.1", 4001)

    def get_transport_addresses(self):
        return []

    def get_connection_type(self):
        return ConnectionType.DIRECT


class Hand:
    """A peer that writes frames by hand, and reads those that come."""

    def __init__(self, stream):
        self.stream = stream
        self._left = b""

    async def send(self, kind, flags, stream_id, length, body=b""):
        await self.stream.send_all(pack(kind, flags, stream_id, length) + body)

    async def data(self, stream_id, body, flags=0):
        await self.send(DATA, flags, stream_id, len(body), body)

    async def frame(self):
        """The next frame as (type, flags, stream, length, body); None at the end."""
        header = await self._exactly(HEADER_BYTES)
        if header is None:
            return None
        version, kind, flags, stream_id, length = HEADER.unpack(header)
        assert version == 0
        body = await self._exactly(length) if kind == DATA else b""
        return kind, flags, stream_id, length, body

    async def frames(self):
        """All frames until the end."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
        return found

    async def _exactly(self, size):
        while len(self._left) < size:
            more = await self.stream.receive_some()
            if not more:
                return None
            self._left += more
        found, self._left = self._left[:size], self._left[size:]
        return found


@asynccontextmanager
async def two(limits=LIMITS, *, streams=None, other=Yamux):
    """Our dialler and a listener, both running; `other` may be the library's."""
    left, right = streams or memory_stream_pair()
    one = Yamux(Pipe(left, is_initiator=True), PEER, limits=limits)
    end = Pipe(right, is_initiator=False)
    two_ = other(end, PEER, limits=limits) if other is Yamux else other(end, PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(two_.start)
        await one.event_started.wait()
        await two_.event_started.wait()
        yield one, two_
        await one.close()
        await two_.close()


@asynccontextmanager
async def against_a_hand(limits=LIMITS, *, streams=None, is_initiator=False):
    """Ours, running, and a hand at the other end."""
    left, right = streams or memory_stream_pair()
    ours = Yamux(Pipe(left, is_initiator=is_initiator), PEER, limits=limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        await ours.event_started.wait()
        yield ours, Hand(right)
        await ours.close()


async def read_all(stream, size=None):
    """All that the other side wrote before it closed."""
    found = []
    try:
        while True:
            found.append(await stream.read(size))
    except MuxedStreamEOF:
        return b"".join(found)
