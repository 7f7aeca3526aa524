"""Leaders and followers on a network: from publications that stand alone, honest or not, or from
stores of their own.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.weights.chain_server import HeadServer
from echo_node.weights.publisher import Publication
from echo_node.weights.puller import Puller
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import Identity, limits, topics
from tests.weights.chains import FOLLOWER, LEADER, rules, state
from tests.weights.stores import LAYOUT, opened, weights

QUICK = DownloadSettings(stall_floor=0.4, stall_cap=5.0, round_pauses=(), renew_seconds=0.1)


def peer(number: int) -> Identity:
    return Identity(number.to_bytes(2) * 16)


@asynccontextmanager
async def following(*publications: Publication, blobs=None, chain=None, of=None):
    """A puller beside a leader that serves these publications, or other bytes for some, or has
    another handler.

    `blobs` is what the leader says to hold under some ids, or how it answers whoever reads.
    """
    shelf = BlobRegistry(len(publications) + 1)
    for made in publications:
        shelf.keep(made.head.id, made.blobs | (blobs if isinstance(blobs, dict) else {}))
    heads = HeadServer(lambda: [made.head for made in publications])
    first = of or state()
    async with MemorySwarm() as swarm, swarm.join(LEADER) as leader, swarm.join(FOLLOWER) as follower:
        desk = BlobServer(leader, shelf)
        if callable(blobs):
            desk._read = blobs
        with (
            desk.serve(),
            leader.serve(topics.CHAIN_STREAM, chain or heads.serve, most=limits.SMALL_BYTES),
            WeightsStore.temporary(rules(first), layout_of(first)) as store,
        ):
            yield Puller(follower, store, blobs=BlobClient(follower, settings=QUICK))


@asynccontextmanager
async def offering(join, store: WeightsStore, identity: Identity = LEADER, **options):
    """A node that gives what is in its store."""
    async with join(identity) as network, WeightsSeeder(network, store, **options).serve():
        yield network


@asynccontextmanager
async def pulling(join, folder, identity: Identity = FOLLOWER, *, named=(), durable=False, **options):
    """A node that follows into a folder, and gives what it has."""
    async with join(identity) as network:
        with opened(folder, durable=durable) as store:
            puller = Puller(network, store, blobs=BlobClient(network, settings=QUICK), named=named, **options)
            async with puller.work():
                yield puller


__all__ = ["LAYOUT", "following", "offering", "peer", "pulling", "weights"]
