"""Targets of responses: what a peer answers is as hostile as what it asks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.credit.statement_client import StatementClient
from echo_node.election.candidate import Candidate
from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.lease import Lease
from echo_node.net.blobs.bulk_client import _ask as ask_for_token
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.providers import Want
from echo_node.net.discovery.address_scope import Scope
from echo_node.net.discovery.peer_exchange import PeerExchange
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.taken_groups import fetch_groups
from echo_node.runs.manifest_exchange import _ask as ask_for_manifest
from echo_node.sampler.delivery import GroupDelivery
from echo_node.trainer.batch_source import BatchRequest
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.request_deadlines import RequestDeadlines
from echo_node.trainer.sequential_source import SequentialSource
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.puller import Puller
from protocol import (
    CreditRefusal,
    CreditStatement,
    Envelope,
    GrantsAnswer,
    HeadsAnswer,
    PeerPlace,
    PeersAnswer,
    ShownGrant,
    TermGrant,
    VoteAnswer,
    blob_id,
    canonical,
    cast,
    decode,
    encode,
    seal,
    topics,
    write_batch,
)
from protocol.blob import BlobHoldings, BulkAsk, BulkOffer, Slice
from tests.fuzz.role_targets import (
    GROUPS,
    RECEIPTS,
    Cast,
    Signers,
    batched,
    group_seeds,
    receipt_seeds,
    role_target,
    sealed,
)
from tests.fuzz.stage import (
    ROSTER,
    SAMPLER,
    STANDBY,
    STRANGER,
    TRAINER,
    VERIFIER,
    Desk,
    group,
    head,
    run,
    signed,
)
from tests.fuzz.term_targets import grant, vote

BLOB: Final = b"a blob of some bytes" * 20
QUICK: Final = DownloadSettings(round_pauses=())


def _saying(answer: bytes) -> Any:
    return lambda _peer, _stream, _question: answer


async def _chain(cast_: Cast, data: bytes) -> None:
    """Heads that follow ours, or grants of the next term.

    What is right is kept, so nothing right is sent twice.
    """
    streams = (topics.CHAIN_STREAM, topics.GRANTS_STREAM)
    wanted = streams[data[0] % 2] if data else ""

    def answer(_peer: bytes, stream: str, _question: bytes) -> bytes:
        if stream == wanted:
            return data[1:]
        return encode(HeadsAnswer(())) if stream == topics.CHAIN_STREAM else encode(GrantsAnswer(()))

    hearing = ChainFollower(Desk(SAMPLER, answer=answer), cast_.store)
    if wanted == topics.CHAIN_STREAM:
        await hearing.ask(STRANGER.public)
    else:
        await hearing.ask_for_grants(STRANGER.public)


def _chain_seeds() -> list[bytes]:
    granted = decode(TermGrant, grant(vote(0)))
    return [
        b"\0" + encode(HeadsAnswer((head(0).sealed, head(1).sealed))),
        b"\0" + encode(HeadsAnswer(())),
        b"\1" + encode(GrantsAnswer(())),
        b"\1" + encode(GrantsAnswer((ShownGrant(granted, (head(1).sealed, head(0).sealed)),))),
    ]


async def _blobs(_cast: Cast, data: bytes) -> None:
    """Who has a blob and how large it is; or, where that was said honestly, the bytes of it."""

    def answer(_peer: bytes, stream: str, _question: bytes) -> bytes:
        if stream == topics.WANTS_STREAM:
            return data[1:] if data[:1] == b"\0" else encode(BlobHoldings((len(BLOB),)))
        return data[1:] if data[:1] != b"\0" else BLOB

    desk = Desk(SAMPLER, answer=answer)
    found = await BlobClient(desk, settings=QUICK).fetch(
        [Want(blob_id(BLOB), most=4_096)], named=[STRANGER.public]
    )
    assert found == {blob_id(BLOB): BLOB}, "what was fetched is not what its name says"


def _blob_seeds() -> list[bytes]:
    return [
        b"\0" + encode(BlobHoldings((len(BLOB),))),
        b"\1" + BLOB,
        b"\1" + BLOB[:-1],
        b"\0" + encode(BlobHoldings((None,))),
    ]


async def _bulk_offer(_cast: Cast, data: bytes) -> None:
    ask = BulkAsk((Slice(blob=bytes(32), length=64, offset=0),))
    await ask_for_token(Desk(SAMPLER, answer=_saying(data)), STRANGER.public, ask)


async def _manifest(_cast: Cast, data: bytes) -> bool:
    found = await ask_for_manifest(Desk(SAMPLER, answer=_saying(data)), STRANGER.public, run().id, set())
    return found is not None


async def _peers(_cast: Cast, data: bytes) -> None:
    asking: Any = _Asked(data)
    exchange = PeerExchange(SAMPLER.public, asking, dict, lambda _peer: Scope.PUBLIC)
    await exchange.request(STRANGER.public, 8, Scope.PUBLIC)


class _Asked:
    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def request(self, *_args: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._answer


async def _ballot(cast_: Cast, data: bytes) -> None:
    desk = Desk(STANDBY, answer=_saying(data))
    hearing = ChainFollower(desk, cast_.store)
    lease = Lease(lambda: cast_.store.follower, 60.0)
    with tempfile.TemporaryDirectory(dir=cast_.folder) as folder:
        box = VoteLog(Path(folder), STANDBY, run().id, durable=False)
        voting = ElectorServer(desk, hearing, lease, box)
        candidate = Candidate(desk, hearing, lease, box, voting, held=lambda: head(1))
        await candidate._ask(VERIFIER.public, vote())


async def _rollouts(_cast: Cast, data: bytes) -> bool:
    part = batched(data, GROUPS)
    if part == canonical.pack([]):
        return False  # no group yet, which is asked again for as long as the limits of the run allow
    desk = Desk(TRAINER, answer=_saying(part))
    admission = Admission(run())
    admission.published(head(), ROSTER)
    receipts, deadlines = Receipts(desk, TRAINER, run().id), RequestDeadlines(64)
    source = SequentialSource(desk, TRAINER, run().id, 1, admission, receipts, deadlines=deadlines)
    return len(await source.next_batch(BatchRequest(1, 0, head(), ROSTER))) == 1


async def _delivered(cast_: Cast, data: bytes) -> None:
    """A receipt from the hand of whom groups were delivered to."""
    desk = Desk(SAMPLER)
    puller = Puller(desk, cast_.store)
    post = GroupDelivery(run().id, desk, SAMPLER, cast_.outbox, puller.chain, cast_.store.blobs, staleness=2)
    await post._on_answer(TRAINER.public, sealed(data, RECEIPTS))


CREDITS: Final[Signers] = (
    (CreditStatement.KIND, VERIFIER),
    (CreditStatement.KIND, TRAINER),
    (CreditStatement.KIND, STRANGER),
)


async def _credit(cast_: Cast, data: bytes) -> None:
    """A verifier's answer, whoever has signed it."""
    account = StatementClient(run(), SAMPLER, cast_.folder / "attested")
    try:
        await account.ask(Desk(SAMPLER, answer=_saying(sealed(data, CREDITS))), VERIFIER.public)
    finally:
        assert {each["role"] for each in account.status()["by"]} <= {"verifier"}, "somebody else is believed"


def _credit_seeds() -> list[bytes]:
    told = CreditStatement(
        at_ms=2_000,
        condemned=1,
        learnt=3,
        refused=(CreditRefusal("stale", 2),),
        sampler=SAMPLER.public,
        since_ms=1_000,
        tokens=99,
        verified=4,
    )
    return [bytes([which]) + encode(told) for which in (1, 2, 3)] + [
        b"\0" + signed(CreditStatement.KIND, encode(told), VERIFIER)
    ]


def _ballots() -> list[bytes]:
    ballot = cast(vote(), VERIFIER, run().id)
    return [
        encode(VoteAnswer(refusal=None, signature=ballot.signature)),
        encode(VoteAnswer(refusal="voted", signature=None)),
        encode(VoteAnswer(refusal="gap", signature=None)),
    ]


def _places() -> list[bytes]:
    places = sorted(
        (
            PeerPlace(each.public, ("/ip4/192.0.2.1/tcp/4001", "/ip6/2001:db8::1/tcp/1"))
            for each in (TRAINER, VERIFIER)
        ),
        key=lambda place: place.key,
    )
    return [encode(PeersAnswer(tuple(places))), encode(PeersAnswer(()))]


async def _taken(_cast: Cast, data: bytes) -> bool:
    """Groups that a leader serves to a verifier."""
    wanted = [Envelope.parse(each).id for each in _two_groups()]
    found = await fetch_groups(Desk(VERIFIER, answer=_saying(data[1:])), run().id, TRAINER.public, wanted)
    assert {each.id for each in found} <= {*wanted}, "a group that was not asked for"
    return bool(found)


def _two_groups() -> list[bytes]:
    return [seal(group(slot), SAMPLER, run().id) for slot in range(2)]


def _taken_seeds() -> list[bytes]:
    first, second = _two_groups()
    return [b"\0" + write_batch(some) for some in ([first, second], [second], [second, first, second])]


TARGETS: Final = [
    role_target("chain-answer", "echo_node.weights.chain_follower.ChainFollower.ask", _chain, _chain_seeds),
    role_target("blob-answer", "echo_node.net.blobs.client.BlobClient.fetch", _blobs, _blob_seeds),
    role_target(
        "bulk-answer",
        "echo_node.net.blobs.bulk_client.read_bulk",
        _bulk_offer,
        lambda: [encode(BulkOffer(pin=bytes(32), port=4001, seconds=30, token=bytes(32)))],
    ),
    role_target(
        "manifest-answer",
        "echo_node.runs.manifest_exchange.find_manifest",
        _manifest,
        lambda: [run().sealed_manifest.sealed],
    ),
    role_target(
        "peers-answer", "echo_node.net.discovery.peer_exchange.PeerExchange.request", _peers, _places
    ),
    role_target("vote-answer", "echo_node.election.candidate.Candidate", _ballot, _ballots),
    role_target(
        "rollout-answer",
        "echo_node.trainer.sequential_source.SequentialSource.next_batch",
        _rollouts,
        group_seeds,
    ),
    role_target("groups-answer", "echo_node.rollouts.taken_groups.fetch_groups", _taken, _taken_seeds),
    role_target("receipt-answer", "echo_node.sampler.delivery.GroupDelivery", _delivered, receipt_seeds),
    role_target(
        "credit-answer", "echo_node.credit.statement_client.StatementClient.ask", _credit, _credit_seeds
    ),
]
