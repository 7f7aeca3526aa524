"""Small states, and a leader that publishes them on an in-memory network, honestly or as a test wants it."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.net.memory import MemorySwarm
from echo_node.weights.heads import HeadServer
from echo_node.weights.publish import Publication, Publisher
from echo_node.weights.pull import Puller
from echo_node.weights.state import layout_of, root_of
from echo_node.weights.store import BlobStore
from protocol import Identity, Roster, Rules, WeightsHead, blob_id, encode, open_sealed, seal, topics

RUN = b"r" * 32
LEADER, FOLLOWER, STRANGER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
NOBODY = Roster(())
SIZES = {"bf16": 2, "f16": 2, "f32": 4}


def tensor(dtype: str, *shape: int, seed: int = 0) -> TensorBytes:
    size = SIZES[dtype] * int(np.prod(shape, dtype=int))
    return TensorBytes(dtype, shape, np.random.default_rng([seed, *shape]).bytes(size))


def state(seed: int = 0) -> dict[str, TensorBytes]:
    """Two types, three ranks, 28 elements."""
    return {
        "b.weight": tensor("bf16", 3, 5, seed=seed),
        "a.scale": tensor("f32", seed=seed),
        "c.bias": tensor("f32", 2, 3, 2, seed=seed),
    }


def rules(of=None) -> Rules:
    first = of or state()
    layout = blob_id(encode(layout_of(first)))
    return Rules(RUN, layout, root_of(first), (LEADER.public,), (LEADER.public,))


def publisher(identity: Identity = LEADER, run: bytes = RUN) -> Publisher:
    luck = iter(range(1_000_000))
    return Publisher(identity, run, luck=lambda: next(luck).to_bytes(32))


def publish(count: int, by: Publisher | None = None) -> list[Publication]:
    """A chain of so many versions."""
    made = by or publisher()
    return [made.publish(state(n), step=n, roster=NOBODY, groups=()) for n in range(count)]


def told_otherwise(made: Publication, **changes) -> Publication:
    """What a leader that lies would sign instead."""
    head = dataclasses.replace(made.head.message, **changes)
    return Publication(open_sealed(seal(head, LEADER, RUN), WeightsHead, RUN), made.blobs)


@asynccontextmanager
async def following(*publications: Publication, blobs=None, chain=None, of=None):
    """A puller beside a leader that serves these publications, or answers by other handlers."""
    store = BlobStore(len(publications) + 1)
    for made in publications:
        store.keep(made.head.id, made.blobs)
    heads = HeadServer([made.head for made in publications])
    async with MemorySwarm() as swarm, swarm.join(LEADER) as leader, swarm.join(FOLLOWER) as follower:
        with (
            leader.serve(topics.BLOB_STREAM, blobs or store.serve, most=32),
            leader.serve(topics.CHAIN_STREAM, chain or heads.serve, most=32),
        ):
            yield Puller(follower, rules(of))
