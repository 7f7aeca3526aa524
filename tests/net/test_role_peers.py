"""Those that a node needs are found through the DHT and kept near, whatever stands between."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.net.discovery.role_peers import RolePeers
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from protocol import topics
from tests.net.behaviour import IDENTITIES, TOPIC, accept, next_of, until

RUN = bytes(32)
TRAINER = topics.role_key(RUN, "trainer")
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def keeping(network, **what):
    company = RolePeers(network, **what)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.run)
        yield company
        nursery.cancel_scope.cancel()


async def test_who_is_needed_is_found_although_it_comes_later(join):
    async with join(IDENTITIES[0]) as one, keeping(one, needed={TRAINER: 2}) as company:
        async with join(IDENTITIES[1]) as two, keeping(two, announced=[TRAINER], needed={}):
            await until(lambda: company.connected(TRAINER) == {two.public})
        await until(lambda: not company.connected(TRAINER))


async def test_one_that_went_is_replaced(join):
    async with (
        join(IDENTITIES[0]) as one,
        join(IDENTITIES[2]) as three,
        keeping(one, needed={TRAINER: 1}) as company,
        trio.open_nursery() as nursery,
    ):
        async with join(IDENTITIES[1]) as two, keeping(two, announced=[TRAINER], needed={}):
            await until(lambda: company.connected(TRAINER) == {two.public})
            nursery.start_soon(RolePeers(three, announced=[TRAINER], needed={}).run)
        await until(lambda: company.connected(TRAINER) == {three.public})
        nursery.cancel_scope.cancel()


async def test_gossip_reaches_a_trainer_that_only_a_bare_seed_knows():
    """The seed subscribes to nothing and forwards nothing; each node dials only the seed."""
    async with join_swarm(IDENTITIES[0], SwarmSettings(listen=LOOPBACK, public=True)) as seed:
        alone = SwarmSettings(listen=LOOPBACK, seeds=tuple(seed.addresses), wanted=1)
        async with (
            join_swarm(IDENTITIES[1], alone) as trainer,
            join_swarm(IDENTITIES[2], alone) as sampler,
            trainer.subscribe(TOPIC, accept) as inbox,
            keeping(trainer, announced=[TRAINER], needed={}),
        ):
            await until(lambda: seed.public in trainer.peers() and seed.public in sampler.peers())
            assert sampler.peers() == {seed.public}
            assert trainer.peers() == {seed.public}
            async with keeping(sampler, needed={TRAINER: 4}) as company:
                await until(lambda: company.connected(TRAINER) == {trainer.public})
                for n in range(60):
                    await sampler.publish(TOPIC, b"%d" % n)
                assert [(await next_of(inbox)).data for _ in range(60)] == [b"%d" % n for n in range(60)]


async def test_it_ends_when_its_node_leaves(join):
    with pytest.RaisesGroup(PeerError, flatten_subgroups=True):
        async with join(IDENTITIES[0]), trio.open_nursery() as nursery, join(IDENTITIES[1]) as two:
            nursery.start_soon(RolePeers(two, needed={TRAINER: 1}).run)
            await until(two.peers)
