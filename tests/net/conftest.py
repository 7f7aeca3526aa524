"""The implementations of the network. Each one in `MEDIA` runs every test that asks for `join`."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from echo_node.net.libp2p import join_swarm
from echo_node.net.memory import MemorySwarm
from echo_node.net.swarm_settings import SwarmSettings
from tests.net.behaviour import IDENTITIES, until


@asynccontextmanager
async def memory():
    async with MemorySwarm(address="127.0.0.1") as swarm:
        yield swarm.join


@asynccontextmanager
async def libp2p():
    """Real hosts on loopback. Each dials those that are there, so that all are connected."""
    here = {}

    @asynccontextmanager
    async def join(identity):
        settings = SwarmSettings(listen=("/ip4/127.0.0.1/tcp/0",), seeds=tuple(here.values()))
        async with join_swarm(identity, settings) as network:
            here[identity.public] = network.addresses[0]
            try:
                yield network
            finally:
                here.pop(identity.public, None)

    yield join


MEDIA = [memory, libp2p]


@pytest.fixture(params=MEDIA, ids=lambda medium: medium.__name__)
async def join(request):
    """Gives nodes that find each other: `async with join(identity) as network`."""
    async with request.param() as factory:
        yield factory


@pytest.fixture
async def pair(join):
    """Two nodes that have found each other."""
    async with join(IDENTITIES[0]) as one, join(IDENTITIES[1]) as two:
        await until(lambda: two.public in one.peers() and one.public in two.peers())
        yield one, two
