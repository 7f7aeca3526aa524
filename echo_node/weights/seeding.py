"""Serve the chain to peers: heads, grants and every blob of the store.

The tables of held versions are announced, newest first, so that a peer finds all who have a
version, and not only the trainer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.blob_registry import BlobRegistry, Held, InFile
from echo_node.net.blobs.server import BlobServer
from echo_node.net.rate_limit import TokenBucket, UploadLimit
from echo_node.storage.blob_dir import BlobDir
from echo_node.weights.chain_server import GrantServer, HeadServer
from echo_node.weights.store import WeightsStore
from protocol import encode, limits, topics

log = logging.getLogger(__name__)

WAITING: Final = 16
"""Tables queued for announcement; when the queue is full, the oldest is dropped."""
AT_ONCE: Final = 8
"""Tables announced at once; beyond that, `A_SECOND` applies."""
A_SECOND: Final = 0.2
"""Tables announced per second: each costs requests to a score of peers, versions may come by the
second, and close followers ask the leader.
"""
_NOTHING: Final[Mapping[bytes, InFile]] = MappingProxyType({})


class BlobDirRegistry(BlobRegistry):
    """Folders of blobs as a registry: a file has its name only once it is complete."""

    def __init__(self, *folders: BlobDir) -> None:
        super().__init__()
        self._folders = folders

    def _find(self, blob: bytes) -> Held | None:
        found = super()._find(blob)
        for folder in self._folders:
            found = found or folder.held(blob)
        return found


class WeightsSeeder:
    """Serves one node's store to its peers."""

    def __init__(
        self,
        network: Network,
        store: WeightsStore,
        *,
        uplink: UploadLimit | None = None,
        shelf: BlobDirRegistry | None = None,
        files: Mapping[bytes, InFile] = _NOTHING,
    ) -> None:
        """Set up; `files` are the model's small ones, for newcomers that have nothing yet."""
        self._network = network
        self._store = store
        shelf = shelf or BlobDirRegistry(store.blobs, store.lent)
        shelf.keep(store.flat.id, {store.flat.id: encode(store.flat.layout), **files})
        self._desk = BlobServer(network, shelf, uplink)
        self._heads = HeadServer(lambda: store.follower.heads)
        self._grants = GrantServer(lambda: store.follower, store.find)
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._announced: set[bytes] = set()
        self._news = trio.Event()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Serve and announce until the context is left."""
        with (
            self._desk.serve(),
            self._network.serve(topics.CHAIN_STREAM, self._heads.serve, most=limits.SMALL_BYTES),
            self._network.serve(topics.GRANTS_STREAM, self._grants.serve, most=limits.SMALL_BYTES),
        ):
            async with trio.open_nursery() as nursery:
                self.announce(self._store.flat.id)
                if (tip := self._store.tip) is not None:
                    for route in tip.message.routes:
                        self.announce_held(route.table)
                nursery.start_soon(self._announce)
                yield
                nursery.cancel_scope.cancel()

    def announce_held(self, table: bytes) -> None:
        """Announce a table, if it is here."""
        if self._store.blobs.has(table):
            self.announce(table)

    def announce(self, blob: bytes) -> None:
        """Announce a blob to others soon."""
        self._waiting.pop(blob, None)
        self._waiting[blob] = None
        while len(self._waiting) > WAITING:
            self._waiting.popitem(last=False)
        self._news.set()

    async def _announce(self) -> None:
        pace = TokenBucket(rate=A_SECOND, burst=AT_ONCE)
        while True:
            while self._waiting:
                await pace.wait()
                blob, _ = self._waiting.popitem()
                self._withdraw()
                if not self._holds(blob):
                    continue  # it was let go while it waited
                self._announced.add(blob)
                try:
                    await self._network.provide(topics.blob_key(blob))
                except PeerError as error:
                    log.info("a table could not be announced: %s", error)
            self._news = trio.Event()
            await self._news.wait()

    def _withdraw(self) -> None:
        """Withdraw removed tables, which would be announced again and again otherwise."""
        for blob in [each for each in self._announced if not self._holds(each)]:
            self._announced.remove(blob)
            self._network.withdraw(topics.blob_key(blob))

    def _holds(self, blob: bytes) -> bool:
        return blob == self._store.flat.id or self._store.blobs.has(blob)
