"""Answers to those who want blobs: what is on the shelf, slices of it, and where the door for large ones is.

What may leave, the shelf says; how fast, the uplink. It knows no tables, and puts nothing on the shelf itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.bulk import BulkPort
from echo_node.net.blobs.shelf import Shelf
from echo_node.net.throttle import Uplink
from protocol import decode, encode, limits, topics
from protocol.blob import BlobHoldings, BlobRead, BlobWants, BulkAsk

READS_EACH: Final = 8
"""Reads of one peer that are answered at once: twice what an honest one asks."""
READS: Final = 16
"""Answers that are held in memory at once, of at most 4 MiB each."""
SMALL: Final = 65_536
"""Bytes that are read without a thread: less work than going to one."""


class BlobDesk:
    """One node's shelf, open to its peers."""

    def __init__(
        self, network: Network, shelf: Shelf, uplink: Uplink | None = None, port: BulkPort | None = None
    ) -> None:
        self._network = network
        self._shelf = shelf
        self._uplink = uplink or Uplink()
        self._port = port
        self._reads: Counter[bytes] = Counter()
        self._room = trio.CapacityLimiter(READS)

    @contextmanager
    def serve(self) -> Generator[None]:
        """Answer until the context is left."""
        network, most = self._network, limits.SLICES_BYTES
        with (
            network.serve(topics.WANTS_STREAM, self._wants, most=most),
            network.serve(topics.BLOB_STREAM, self._read, most=most),
        ):
            if self._port is None:
                yield
            else:
                with network.serve(topics.BULK_STREAM, self._bulk, most=most):
                    yield

    async def _wants(self, _peer: bytes, question: bytes) -> bytes:
        wants = decode(BlobWants, question)
        return encode(BlobHoldings(tuple(self._shelf.size(blob) for blob in wants.ids())))

    async def _read(self, peer: bytes, question: bytes) -> bytes:
        slices = decode(BlobRead, question).slices
        total = self._shelf.check(slices)
        if self._reads[peer] >= READS_EACH:
            raise PeerError(f"{READS_EACH} reads of yours are being answered")
        self._reads[peer] += 1
        try:
            await self._uplink.take(peer, total)
            async with self._room:
                if total <= SMALL:
                    return self._shelf.read(slices)
                return await trio.to_thread.run_sync(self._shelf.read, slices)
        finally:
            self._reads[peer] -= 1
            if not self._reads[peer]:
                del self._reads[peer]

    async def _bulk(self, peer: bytes, question: bytes) -> bytes:
        if self._port is None:
            raise PeerError("this node has no door")
        return encode(self._port.offer(peer, decode(BulkAsk, question)))
