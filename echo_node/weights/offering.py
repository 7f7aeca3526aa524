"""What this node gives to others of the chain: heads, grants, and every blob that its store holds, from the moment it is whole.

It announces the tables that it holds, newest first, so that whoever wants a version finds those who have it, the
trainer being one of many. It fetches nothing, and decides nothing about what is kept.
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
from echo_node.net.blobs.bulk import BulkPort
from echo_node.net.blobs.serving import BlobDesk
from echo_node.net.blobs.shelf import Held, InFile, Shelf
from echo_node.net.pace import Pace
from echo_node.net.throttle import Uplink
from echo_node.weights.blobfolder import BlobFolder
from echo_node.weights.grants import GrantServer
from echo_node.weights.heads import HeadServer
from echo_node.weights.store import WeightsStore
from protocol import encode, limits, topics

log = logging.getLogger(__name__)

WAITING: Final = 16
"""Tables that wait to be announced; when more come, the oldest is not."""
AT_ONCE: Final = 8
"""Tables that are announced as soon as they are here; after that,"""
A_SECOND: Final = 0.2
"""so many: each costs questions to a score of peers, versions may come by the second, and whoever follows closely asks the
leader."""
_NOTHING: Final[Mapping[bytes, InFile]] = MappingProxyType({})


class FolderShelf(Shelf):
    """Folders of blobs as a shelf: a file stands there under its hash only when it is whole and right."""

    def __init__(self, *folders: BlobFolder) -> None:
        super().__init__()
        self._folders = folders

    def _find(self, blob: bytes) -> Held | None:
        found = super()._find(blob)
        for folder in self._folders:
            found = found or folder.held(blob)
        return found


class Offering:
    """One node's store, open to its peers."""

    def __init__(
        self,
        network: Network,
        store: WeightsStore,
        *,
        uplink: Uplink | None = None,
        port: BulkPort | None = None,
        shelf: FolderShelf | None = None,
        files: Mapping[bytes, InFile] = _NOTHING,
    ) -> None:
        """`files` are the model's small ones, for newcomers that have nothing yet."""
        self._network = network
        self._store = store
        shelf = shelf or FolderShelf(store.blobs, store.lent)
        shelf.keep(store.flat.id, {store.flat.id: encode(store.flat.layout), **files})
        self._desk = BlobDesk(network, shelf, uplink, port)
        self._heads = HeadServer(lambda: store.follower.heads)
        self._grants = GrantServer(lambda: store.follower, store.find)
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._announced: set[bytes] = set()
        self._news = trio.Event()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Answer and announce until the context is left."""
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
        """Let others find this node by a blob, soon."""
        self._waiting.pop(blob, None)
        self._waiting[blob] = None
        while len(self._waiting) > WAITING:
            self._waiting.popitem(last=False)
        self._news.set()

    async def _announce(self) -> None:
        pace = Pace(rate=A_SECOND, burst=AT_ONCE)
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
        """What was let go is announced no longer: else it would be, again and again, for as long as this node is there."""
        for blob in [each for each in self._announced if not self._holds(each)]:
            self._announced.remove(blob)
            self._network.withdraw(topics.blob_key(blob))

    def _holds(self, blob: bytes) -> bool:
        return blob == self._store.flat.id or self._store.blobs.has(blob)
