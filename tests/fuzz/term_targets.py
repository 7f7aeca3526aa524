"""Targets of every node: following the chain and its leader, voting, and serving what it holds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from echo_node.credit.statement_server import serve_statements
from echo_node.election.checkpoint_replication import CheckpointFetcher
from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.heartbeat import HeartbeatMonitor
from echo_node.election.lease import Lease
from echo_node.errors import PeerError
from echo_node.net.discovery.address_scope import Scope
from echo_node.net.discovery.peer_exchange import PeerExchange
from echo_node.rollouts.taken_groups import TakenGroups
from echo_node.runs.manifest_exchange import serve_manifest
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.seeding import WeightsSeeder
from protocol import (
    GrantsQuestion,
    GroupsQuestion,
    HeadsQuestion,
    Heartbeat,
    Identity,
    PeersQuestion,
    TermGrant,
    TermVote,
    VoteQuestion,
    WeightsHead,
    cast,
    encode,
    limits,
    open_sealed,
    seal,
    topics,
)
from protocol.blob import BlobRead, BlobWants, BulkAsk, Slice
from tests.fuzz.role_targets import Cast, Signers, role_target, sealed, topic
from tests.fuzz.stage import SAMPLER, STANDBY, STRANGER, TRAINER, VERIFIER, Desk, group, head, run

TERM_TWO: Final = 2


HEADS: Final[Signers] = (
    (WeightsHead.KIND, TRAINER),
    (WeightsHead.KIND, STANDBY),
    (WeightsHead.KIND, STRANGER),
)


async def _heads(cast_: Cast, data: bytes) -> bool:
    """Judged, and not kept: each input meets the same chain."""
    desk = Desk(SAMPLER, gossip={topic(topics.HEADS): sealed(data, HEADS)})
    async with desk.subscribe(topic(topics.HEADS), ChainFollower(desk, cast_.store).judge):
        return bool(desk.heard)


def _head_seeds() -> list[bytes]:
    bodies = [encode(head(version).message) for version in range(4)]
    return [b"\1" + body for body in bodies] + [b"\2" + bodies[2], b"\0" + head(2).sealed]


def vote(base: int = 1, leader: Identity = STANDBY) -> TermVote:
    return TermVote(base=head(base).id, leader=leader.public, term=TERM_TWO)


def grant(vote: TermVote) -> bytes:
    ballots = sorted(
        (cast(vote, each, run().id) for each in (STANDBY, VERIFIER)), key=lambda one: one.elector
    )
    return encode(TermGrant(tuple(ballots), vote))


async def _grants(cast_: Cast, data: bytes) -> bool:
    desk = Desk(SAMPLER, gossip={topic(topics.GRANTS): data[1:]})
    async with desk.subscribe(topic(topics.GRANTS), ChainFollower(desk, cast_.store).judge_grant):
        return bool(desk.heard)


BEATS: Final[Signers] = ((Heartbeat.KIND, TRAINER), (Heartbeat.KIND, STANDBY), (Heartbeat.KIND, STRANGER))


async def _beats(cast_: Cast, data: bytes) -> bool:
    """A standby hears them: what they name as checkpoint may be fetched."""
    desk = Desk(STANDBY, gossip={topic(topics.HEARTBEATS): sealed(data, BEATS)})
    hearing = ChainFollower(desk, cast_.store)
    lease = Lease(lambda: cast_.store.follower, 60.0, clock=lambda: 1.0)
    borrowing = CheckpointFetcher(desk, cast_.folder / "borrowed", lambda _path: None, most=2**20)
    pulse = HeartbeatMonitor(desk, hearing, lease, on_heartbeat=borrowing.hear)
    lease.begin()
    async with desk.subscribe(topic(topics.HEARTBEATS), pulse.judge) as beats:
        async for message in beats:
            pulse.hear(open_sealed(message.data, Heartbeat, run().id), message.sender)
    return bool(desk.heard)


def _beat_seeds() -> list[bytes]:
    ext = {"checkpoint": {"blob": bytes(32), "size": 1000, "step": 4}}
    beats = [
        Heartbeat(head=head(version).id, term=term, time_ms=1_000, version=version, ext=ext)
        for version, term in ((1, 1), (3, 1), (3, 2))
    ]
    return [b"\1" + encode(beat) for beat in beats] + [b"\2" + encode(beats[2])]


async def _votes(cast_: Cast, data: bytes) -> bool:
    """The asker is the candidate that the question names; what is voted goes to a fresh box."""
    desk = Desk(VERIFIER)
    with tempfile.TemporaryDirectory(dir=cast_.folder) as folder:
        box = VoteLog(Path(folder), VERIFIER, run().id, durable=False)
        lease = Lease(lambda: cast_.store.follower, 60.0, clock=lambda: 1.0)
        lease._listening, lease._heard = -1e6, None
        voting = ElectorServer(desk, ChainFollower(desk, cast_.store), lease, box, held=lambda: head(1))
        with voting.serve():
            return await desk.ask(topics.VOTE_STREAM, data[1:], STANDBY.public)


def _vote_seeds() -> list[bytes]:
    questions = [
        VoteQuestion((), vote()),
        VoteQuestion((head(2).sealed,), vote(2)),
        VoteQuestion((), vote(leader=TRAINER)),
    ]
    return [b"\0" + encode(each) for each in questions]


# What any node serves

_STREAMS: Final = (
    topics.WANTS_STREAM,
    topics.BLOB_STREAM,
    topics.BULK_STREAM,
    topics.CHAIN_STREAM,
    topics.GRANTS_STREAM,
    topics.MANIFEST_STREAM,
    topics.PEERS_STREAM,
    topics.CREDIT_STREAM,
    topics.GROUPS_STREAM,
)


async def _served(cast_: Cast, data: bytes) -> bool:
    desk = Desk(SAMPLER)
    stream = _STREAMS[data[0] % len(_STREAMS)] if data else topics.WANTS_STREAM
    desk.bulk = SimpleNamespace(offer=_refuse_bulk)
    exchange = PeerExchange(
        SAMPLER.public,
        desk._asking,
        lambda: {TRAINER.public: ["/ip4/192.0.2.5/tcp/4001"]},
        lambda _peer: Scope.PUBLIC,
    )
    async with WeightsSeeder(desk, cast_.store).serve(), serve_manifest(desk, run().sealed_manifest):
        with (
            desk.serve(topics.PEERS_STREAM, exchange.respond, most=limits.PEERS_QUESTION_BYTES),
            serve_statements(desk, SAMPLER, run().id, cast_.journal.sums),
            taken_groups().serve(desk),
        ):
            peer = VERIFIER if stream == topics.GROUPS_STREAM else STRANGER
            return await desk.ask(stream, data[1:], peer.public)


def taken_groups() -> TakenGroups:
    """What a leader serves that took two groups."""
    taken = TakenGroups(run())
    for slot in range(2):
        taken.add(bytes([slot]) * 32, seal(group(slot), SAMPLER, run().id))
    return taken


def _refuse_bulk(_peer: bytes, ask: BulkAsk, _registry: object, _uplink: object) -> object:
    raise PeerError(f"no token for {len(ask.slices)} slices here")


def _served_seeds() -> list[bytes]:
    layout = run().rules.layout
    slices = (Slice(blob=layout, length=64, offset=0),)
    questions = [
        encode(BlobWants.of([layout, bytes(32)])),
        encode(BlobRead(slices)),
        encode(BulkAsk(slices)),
        encode(HeadsQuestion.of([head().id])),
        encode(GrantsQuestion((head().id,), 1)),
        run().id,
        encode(PeersQuestion(8)),
        run().id,
        encode(GroupsQuestion(groups=bytes(32) + b"\1" * 32 + b"?" * 32, run=run().id)),
    ]
    return [bytes([which]) + each for which, each in enumerate(questions)]


TARGETS: Final = [
    role_target("heads", "echo_node.weights.chain_follower.ChainFollower.judge", _heads, _head_seeds),
    role_target(
        "grants",
        "echo_node.weights.chain_follower.ChainFollower.judge_grant",
        _grants,
        lambda: [b"\0" + grant(vote(base)) for base in (0, 1, 2)],
    ),
    role_target("heartbeats", "echo_node.election.heartbeat.HeartbeatMonitor.judge", _beats, _beat_seeds),
    role_target("vote", "echo_node.election.elector.ElectorServer._answer", _votes, _vote_seeds),
    role_target("served", "echo_node.weights.seeding.WeightsSeeder.serve", _served, _served_seeds),
]
