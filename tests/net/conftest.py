"""The media of the network. A medium that is added to `MEDIA` goes through every test that asks for `join`."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from echo_node.net.memory import MemorySwarm
from tests.net.behaviour import IDENTITIES, until


@asynccontextmanager
async def memory():
    async with MemorySwarm() as swarm:
        yield swarm.join


MEDIA = [memory]


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
