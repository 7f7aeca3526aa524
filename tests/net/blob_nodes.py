"""Nodes that hold blobs, honest or not, for the tests of downloads."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.bulk_server import open_port
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.net.rate_limit import UploadLimit
from protocol import Identity, blob_id, topics

MIB = 1024 * 1024
ASKER = Identity(b"a" * 32)
QUICK = DownloadSettings(stall_floor=0.4, stall_factor=4.0, stall_cap=5.0)
"""As patient as a test."""
BY_BULK_PORT = DownloadSettings(
    stall_floor=0.4, stall_factor=4.0, stall_cap=5.0, bulk_from=1, least_span=2 * MIB, span=4 * MIB
)


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def flipped(data: bytes, every: int = MIB) -> bytes:
    """The same number of bytes, with a bit wrong in each stretch of so many."""
    wrong = bytearray(data)
    for at in range(every // 2, len(wrong), every):
        wrong[at] ^= 1
    return bytes(wrong)


class Silence(UploadLimit):
    """An uplink on which, after so many bytes, nothing passes any more."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.limited = True
        self._left = after

    async def take(self, peer: bytes, count: int) -> None:
        self._left -= count
        if self._left < 0:
            await trio.sleep_forever()
        await super().take(peer, count)


class Site:
    """A swarm with one node that downloads and any number that serve."""

    def __init__(self, swarm: MemorySwarm, network, nursery: trio.Nursery, stack: AsyncExitStack) -> None:
        self.swarm = swarm
        self.network = network
        self._nursery = nursery
        self._stack = stack
        self._count = 0

    def blobs(self, settings=QUICK, **more) -> BlobClient:
        return BlobClient(self.network, settings=settings, luck=random.Random(5), **more)

    async def source(self, blobs, *, uplink=None, bulk=False, announce=True):
        """A node that serves these blobs; it can be killed."""
        self._count += 1
        return await self._nursery.start(
            _serve, self.swarm, bytes([self._count]) * 32, blobs, uplink, bulk, announce
        )


class Source:
    """A node that serves. `kill` takes it away from one moment to the next."""

    def __init__(self, network, scope, port) -> None:
        self.network = network
        self.public = network.public
        self.port = port
        self._scope = scope

    def desk_reads(self, handler) -> None:
        """From now on, this is how it answers whoever reads."""
        self.network._services[topics.BLOB_STREAM].handler = handler

    def kill(self) -> None:
        self._scope.cancel()


async def _serve(swarm, seed, blobs, uplink, bulk, announce, *, task_status):
    registry = BlobRegistry()
    registry.keep(b"all", {blob_id(data): data for data in blobs} if isinstance(blobs, list) else blobs)
    with trio.CancelScope() as scope:
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(swarm.join(Identity(seed)))
            port = await stack.enter_async_context(open_port(network)) if bulk else None
            network.bulk = port
            stack.enter_context(BlobServer(network, registry, uplink).serve())
            if announce:
                for blob in registry._names[b"all"]:
                    await network.provide(topics.blob_key(blob))
            task_status.started(Source(network, scope, port))
            await trio.sleep_forever()


@asynccontextmanager
async def site(address: str | None = "127.0.0.1", swarm=None):
    async with AsyncExitStack() as stack:
        swarm = swarm or await stack.enter_async_context(MemorySwarm(address=address))
        network = await stack.enter_async_context(swarm.join(ASKER))
        async with trio.open_nursery() as nursery:
            yield Site(swarm, network, nursery, stack)
            nursery.cancel_scope.cancel()
