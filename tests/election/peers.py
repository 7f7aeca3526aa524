"""Peers of a run with a few trainers and verifiers, on the in-memory swarm: heads that are real,
and weights that nobody needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import asynccontextmanager

import trio
import trio.testing

from echo_node.election.candidate import Candidate
from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.heartbeat import HeartbeatMonitor, HeartbeatSender
from echo_node.election.lease import Lease
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from protocol import (
    ZERO,
    Heartbeat,
    Identity,
    Route,
    Rules,
    TermGrant,
    TermVote,
    WeightsHead,
    cast,
    merkle_root,
    open_sealed,
    seal,
    topics,
)
from protocol.manifest import Terms
from tests.weights.keys import RUN, rules_of
from tests.weights.stores import LAYOUT, weights

ANN, BEN, CAT, VAL, WIN, SAM = (Identity(bytes([n]) * 32) for n in range(11, 17))
"""Trainers in the order in which they may lead, two verifiers, and a sampler."""
BEAT, LEASE = 15.0, 60.0
_luck = itertools.count()


def rules(trainers=(ANN, BEN), electors=(ANN, BEN, VAL)) -> Rules:
    return dataclasses.replace(
        rules_of(weights(0)),
        trainers=tuple(each.public for each in trainers),
        electors=tuple(sorted(each.public for each in electors)),
    )


def terms(of: Rules) -> Terms:
    return Terms(electors=of.electors, heartbeat_ms=int(1000 * BEAT), lease_ms=int(1000 * LEASE))


def head_after(follower, identity: Identity, *, term=None, tip="held"):
    """The next head of a chain, as this key would sign it."""
    tip = follower.tip if tip == "held" else tip
    message = WeightsHead(
        groups=merkle_root([]),
        layout=follower.rules.layout,
        luck=next(_luck).to_bytes(32),
        previous=tip.id if tip else ZERO,
        root=follower.rules.root,
        roster=bytes(32),
        routes=(Route(base=None, codec="safetensors", size=1, table=bytes(32)),),
        step=tip.message.step + 1 if tip else 0,
        term=term or follower.term,
        version=tip.message.version + 1 if tip else 0,
    )
    return open_sealed(seal(message, identity, RUN), WeightsHead, RUN)


def beat_of(follower, identity: Identity, time_ms: int, **changes):
    told = {"head": follower.tip.id if follower.tip else ZERO, "term": follower.term, "version": 0}
    beat = Heartbeat(time_ms=time_ms, **(told | changes))
    return open_sealed(seal(beat, identity, RUN), Heartbeat, RUN)


def granted(vote: TermVote, *electors: Identity) -> TermGrant:
    ballots = sorted((cast(vote, each, RUN) for each in electors), key=lambda ballot: ballot.elector)
    return TermGrant(tuple(ballots), vote)


class Peer:
    """One node that follows, listens, votes if it may, and can lead or stand."""

    def __init__(self, network, identity, store, folder) -> None:
        self.network, self.identity, self.store = network, identity, store
        self.chain = ChainFollower(network, store)
        self.lease = Lease(lambda: store.follower, LEASE)
        self.pulse = HeartbeatMonitor(network, self.chain, self.lease)
        self.votes = VoteLog(folder, identity, RUN, durable=False)
        self.server = ElectorServer(network, self.chain, self.lease, self.votes)
        self.candidate = Candidate(
            network, self.chain, self.lease, self.votes, self.server, held=lambda: store.follower.tip
        )
        self.seeder = WeightsSeeder(network, store)
        self.seen: dict[tuple[int, int], bytes] = {}
        """Every head that was ever its tip's, by term and version."""

    @property
    def follower(self):
        return self.store.follower

    async def publish(self):
        """Lead on by one version."""
        head = head_after(self.follower, self.identity)
        await trio.to_thread.run_sync(self.store.keep_head, head)
        await self.network.publish(topics.topic(RUN, topics.HEADS), head.sealed)
        return head

    async def lead(self) -> None:
        """Beat until cancelled."""
        await HeartbeatSender(
            self.network, self.identity, lambda: self.follower, self.lease, seconds=BEAT
        ).beat()

    async def reach(self, condition) -> None:
        """Wait until the chain is as is wanted."""
        with trio.fail_after(20 * LEASE):
            while not condition(now := self.follower):
                await self.chain.wait_for_change(now)


@asynccontextmanager
async def peer(swarm, identity: Identity, folder, of: Rules | None = None):
    """A node on a swarm; its store and votes are in the folder, and found again there."""
    place = folder / identity.peer_id
    place.mkdir(exist_ok=True)
    with WeightsStore.open(place / "weights", of or rules(), LAYOUT, durable=False) as store:
        async with swarm.join(identity) as network:
            node = Peer(network, identity, store, place / "votes")
            async with node.seeder.serve(), trio.open_nursery() as nursery:
                with node.server.serve():
                    nursery.start_soon(node.chain.follow)
                    nursery.start_soon(node.pulse.follow)
                    yield node
                nursery.cancel_scope.cancel()
