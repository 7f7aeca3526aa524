"""Blob server: which blobs are held, ranges of them, bulk-port tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.rate_limit import UploadLimit
from protocol import decode, encode, limits, topics
from protocol.blob import BlobHoldings, BlobRead, BlobWants, BulkAsk

READS_EACH: Final = 8
"""Concurrent reads of one peer: twice what an honest one makes."""
READS: Final = 16
"""Answers held in memory at once, of at most 4 MiB each."""
SMALL: Final = 65_536
"""Bytes up to which a read is made in the event loop, which costs less than a thread."""


class BlobServer:
    """Serve a blob registry over streams, and at the bulk port if there is one."""

    def __init__(
        self,
        network: Network,
        registry: BlobRegistry,
        uplink: UploadLimit | None = None,
    ) -> None:
        self._network = network
        self._registry = registry
        self._uplink = uplink or UploadLimit()
        self._reads: Counter[bytes] = Counter()
        self._room = trio.CapacityLimiter(READS)

    @contextmanager
    def serve(self) -> Generator[None]:
        """Answer questions until the context is left."""
        network, most = self._network, limits.SLICES_BYTES
        with (
            network.serve(topics.WANTS_STREAM, self._wants, most=most),
            network.serve(topics.BLOB_STREAM, self._read, most=most),
        ):
            if network.bulk is None:
                yield
            else:
                with network.serve(topics.BULK_STREAM, self._bulk, most=most):
                    yield

    async def _wants(self, _peer: bytes, question: bytes) -> bytes:
        wants = decode(BlobWants, question)
        return encode(BlobHoldings(tuple(self._registry.size(blob) for blob in wants.ids())))

    async def _read(self, peer: bytes, question: bytes) -> bytes:
        slices = decode(BlobRead, question).slices
        total = self._registry.check(slices)
        if self._reads[peer] >= READS_EACH:
            raise PeerError(f"{READS_EACH} of your reads are being answered; wait for one")
        self._reads[peer] += 1
        try:
            await self._uplink.take(peer, total)
            async with self._room:
                if total <= SMALL:
                    return self._registry.read(slices)
                return await trio.to_thread.run_sync(self._registry.read, slices)
        finally:
            self._reads[peer] -= 1
            if not self._reads[peer]:
                del self._reads[peer]

    async def _bulk(self, peer: bytes, question: bytes) -> bytes:
        port = self._network.bulk
        if port is None:
            raise PeerError("this node has no bulk port")
        return encode(port.offer(peer, decode(BulkAsk, question), self._registry, self._uplink))
