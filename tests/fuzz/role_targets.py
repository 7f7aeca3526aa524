"""Targets of the roles: gossip and requests to trainers, verifiers, samplers, standbys, electors.

The first byte says who has signed the rest: nobody (it is sealed as it came), or a member of the
run, whose seal is real.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.engine.base import EngineError
from echo_node.net.outbox.direct_delivery import Taker, serve_deliveries
from echo_node.net.outbox.outbox import open_outbox
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator, validate_inventories, validate_receipt
from echo_node.rollouts.group_refs import GroupRefFetcher
from echo_node.sampler.loop import SamplerLoop
from echo_node.trainer.gossip_source import GossipSource
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.journal import TrainingJournal, open_journal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.sender_quota import SenderQuota
from echo_node.trainer.verdict_listener import StandbyVerdictListener, VerdictEnforcer, VerdictListener
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.verifier.loop import VerifierLoop
from echo_node.weights.puller import Puller
from protocol import (
    Delivery,
    Figures,
    GroupReference,
    Identity,
    Inventory,
    InventoryAck,
    Join,
    Receipt,
    Refusal,
    RolloutRequest,
    TrajectoryGroup,
    Verdict,
    encode,
    limits,
    open_sealed,
    seal,
    topics,
    write_batch,
)
from protocol.verdict import sign_draw
from tests.fuzz.loops import AFeed, looped
from tests.fuzz.stage import (
    ENGINE,
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
    store,
)
from tests.fuzz.target import Target

STILL: Final = 0.05
"""Seconds of rest before the clock jumps, where threads and disks have their say."""
Signers = tuple[tuple[str, Identity], ...]
"""Kinds of messages, and who signs them."""


def topic(cargo: str) -> str:
    return topics.topic(run().id, cargo)


def sealed(data: bytes, signers: Signers) -> bytes:
    """The input as it came, or under the seal that its first byte chooses."""
    if not data or not (which := data[0] % (len(signers) + 1)):
        return data[1:]
    kind, by = signers[which - 1]
    return signed(kind, data[1:], by)


@dataclass(frozen=True, slots=True)
class Cast:
    """What the parts of a target share while it is open."""

    store: Any
    journal: TrainingJournal
    outbox: Any
    folder: Path


Part = Callable[[Cast, bytes], Awaitable[object]]


def role_target(
    name: str, entry: str, part: Part, seeds: Callable[[], list[bytes]], *, takes: bool = True
) -> Target:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[AFeed]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-fuzz-")))
            held = stack.enter_context(store())
            async with open_journal(None, run().id) as journal, open_outbox(folder / "outbox") as outbox:
                cast_ = Cast(held, journal, outbox, folder)

                async def feed(data: bytes) -> object:
                    return await part(cast_, data)

                yield feed

    return Target(
        name=name,
        entry=entry,
        opener=functools.partial(looped, opened, still=STILL),
        seeds=seeds,
        prefix=1,
        takes=takes,
        memory=16 * 2**20,
    )


# The trainer

GROUPS: Final[Signers] = (
    (TrajectoryGroup.KIND, SAMPLER),
    (GroupReference.KIND, SAMPLER),
    (TrajectoryGroup.KIND, STRANGER),
)


def _source(cast_: Cast, desk: Desk) -> GossipSource:
    admission = Admission(run())
    for version in range(2):
        admission.published(head(version), ROSTER)
    buffer = ReplayBuffer(capacity=6, staleness=2)
    receipts = Receipts(desk, TRAINER, run().id)
    receipts.set_head(head(1))
    fetching = GroupRefFetcher(desk, run().id)
    return GossipSource(
        run().id,
        2,
        buffer,
        receipts,
        admission,
        cast_.journal,
        validator := GossipValidator(run(), admission),
        SenderQuota(validator.named),
        fetching,
    )


def batched(data: bytes, signers: Signers) -> bytes:
    """A batch of one, or as it came."""
    found = sealed(data, signers)
    if data and data[0] % (len(signers) + 1) and len(found) <= limits.GOSSIP_BYTES - 16:
        return write_batch([found])
    return found


async def _groups(cast_: Cast, data: bytes) -> bool:
    desk = Desk(TRAINER, gossip={topic(topics.GROUPS): batched(data, GROUPS)}, sender=SAMPLER.public)
    source = _source(cast_, desk)
    await source.listen(desk)
    return len(source._buffer) > 0


def group_seeds() -> list[bytes]:
    bodies = [encode(group(slot, version)) for slot, version in ((0, 0), (1, 0), (0, 1))]
    whole = write_batch([signed(TrajectoryGroup.KIND, body, SAMPLER) for body in bodies])
    reference = GroupReference(blob=bytes(32), group=bytes(32), head=head().id, size=900, slot=0)
    return [b"\0" + whole, b"\2" + encode(reference), *(b"\1" + body for body in bodies), b"\3" + bodies[0]]


DELIVERIES: Final[Signers] = (*GROUPS, (Join.KIND, SAMPLER), (Join.KIND, STRANGER))


async def _deliver(cast_: Cast, data: bytes) -> bool:
    which = data[0] % (len(DELIVERIES) + 1) if data else 0
    desk = Desk(TRAINER)
    source = _source(cast_, desk)
    takers = {
        topic(topics.JOINS): RosterBuilder(run()).taker(cast_.journal),
        topic(topics.GROUPS): Taker(source.validate, source.take),
    }
    if which == 0:
        question = data[1:]
    elif which > len(GROUPS):
        question = encode(Delivery.on(topic(topics.JOINS), sealed(data, DELIVERIES)[: limits.GOSSIP_BYTES]))
    else:
        question = encode(Delivery.on(topic(topics.GROUPS), batched(data, DELIVERIES)[: limits.GOSSIP_BYTES]))
    with serve_deliveries(desk, takers):
        return await desk.ask(topics.DELIVER_STREAM, question, SAMPLER.public)


def _delivery_seeds() -> list[bytes]:
    join = encode(Join(agent="fuzz", engine=ENGINE, head=head().id, name="me"))
    whole = Delivery.on(topic(topics.JOINS), signed(Join.KIND, join, SAMPLER))
    return [b"\0" + encode(whole), b"\4" + join, b"\5" + join, *group_seeds()[1:]]


VERDICTS: Final[Signers] = ((Verdict.KIND, VERIFIER), (Verdict.KIND, SAMPLER))


async def _verdicts(cast_: Cast, data: bytes) -> bool:
    desk = Desk(TRAINER, gossip={topic(topics.VERDICTS): batched(data, VERDICTS)})
    receipts = Receipts(desk, TRAINER, run().id)
    receipts.set_head(head(1))
    policy = VerdictPolicy(run(), TRAINER, clock=lambda: 1e9)
    buffer = ReplayBuffer(capacity=6, staleness=2)
    enforcer = VerdictEnforcer(buffer, receipts, cast_.journal)
    await VerdictListener(run(), policy, enforcer, cast_.journal).listen(desk)
    return bool(desk.heard)


async def _witnessed(cast_: Cast, data: bytes) -> bool:
    desk = Desk(STANDBY, gossip={topic(topics.VERDICTS): batched(data, VERDICTS)})
    await StandbyVerdictListener(run(), desk, STANDBY, cast_.journal, clock=lambda: 1e9).follow()
    return bool(desk.heard)


def _verdict_seeds() -> list[bytes]:
    figures = Figures(
        contrast=0.0, d_mean=0.0, d_most=0.0, logprob_gap=0.0, reward=1.0, tokens=8, z_mean=0.0, z_most=0.0
    )
    said = [
        Verdict(
            draw=sign_draw(VERIFIER, run().id, bytes(32)),
            figures=figures,
            group=bytes(32),
            note="",
            reason="honest" if result == "honest" else "own-luck",
            result=result,
        )
        for result in ("honest", "dishonest")
    ]
    bodies = [encode(each) for each in said]
    return [b"\1" + body for body in bodies] + [
        b"\0" + write_batch([signed(Verdict.KIND, bodies[0], VERIFIER)])
    ]


ACKS: Final[Signers] = (
    (InventoryAck.KIND, VERIFIER),
    (InventoryAck.KIND, SAMPLER),
    (Inventory.KIND, TRAINER),
)


async def _acknowledged(_cast: Cast, data: bytes) -> bool:
    desk = Desk(TRAINER, gossip={topic(topics.INVENTORIES): sealed(data, ACKS)})
    receipts = Receipts(desk, TRAINER, run().id)
    policy = VerdictPolicy(run(), TRAINER, clock=lambda: 1e9)
    buffer = ReplayBuffer(capacity=6, staleness=2)
    publisher = InventoryPublisher(run(), desk, TRAINER, policy, buffer, receipts)
    publisher._published[bytes(32)] = (b"a" * 32, b"b" * 32)
    await publisher.listen()
    return bool(desk.heard)


def _ack_seeds() -> list[bytes]:
    lists = ((b"", b""), (b"b" * 32, b"c" * 32))
    acks = [encode(InventoryAck(inventory=bytes(32), lacking=one, drawn=other)) for one, other in lists]
    return [*(b"\1" + each for each in acks), *(b"\2" + each for each in acks)]


# The verifier


class NoEngine:
    """An engine that has not come up: messages of peers are checked before it is used."""

    engine_class = ENGINE
    loaded = None

    def load(self, *_args: Any) -> None:
        raise EngineError("there is none")

    generate = score = score_many = patch = load


async def _to_verify(cast_: Cast, data: bytes) -> bool:
    desk = Desk(VERIFIER, gossip={topic(topics.GROUPS): batched(data, GROUPS)}, sender=SAMPLER.public)
    loop = VerifierLoop(run(), desk, VERIFIER, NoEngine(), Puller(desk, cast_.store), clock=lambda: 1e9)
    for version in range(2):
        loop._admission.published(head(version), ROSTER)
    async with desk.subscribe(topic(topics.GROUPS), loop._look_at) as groups:
        await loop._hear(groups)
    return bool(loop._admission._filled)


async def _listed(cast_: Cast, data: bytes) -> bool:
    answer = write_batch([seal(group(), SAMPLER, run().id)])
    desk = Desk(
        VERIFIER,
        gossip={topic(topics.INVENTORIES): sealed(data, INVENTORIES)},
        answer=lambda _peer, _stream, _question: answer,
    )
    loop = VerifierLoop(run(), desk, VERIFIER, NoEngine(), Puller(desk, cast_.store), clock=lambda: 1e9)
    loop._admission.published(head(0), ROSTER)
    async with desk.subscribe(
        topic(topics.INVENTORIES), functools.partial(validate_inventories, run())
    ) as inventories:
        await loop._hear_inventories(inventories)
    return bool(desk.heard)


INVENTORIES: Final[Signers] = (
    (Inventory.KIND, TRAINER),
    (Inventory.KIND, STRANGER),
    (InventoryAck.KIND, VERIFIER),
)


def _inventory_seeds() -> list[bytes]:
    listed = b"".join(
        [open_sealed(seal(group(), SAMPLER, run().id), TrajectoryGroup, run().id).id, bytes(32)]
    )
    inventories = [Inventory(groups=listed, head=head(1).id, number=number, term=1) for number in (1, 2)]
    return [bytes([which]) + encode(each) for which in (1, 2) for each in inventories]


# The sampler


def _sampler(cast_: Cast, desk: Desk) -> SamplerLoop:
    puller = Puller(desk, cast_.store)
    return SamplerLoop(run(), desk, SAMPLER, NoEngine(), puller, cast_.outbox, slots_per_call=1, agent="fuzz")


RECEIPTS: Final[Signers] = ((Receipt.KIND, TRAINER), (Receipt.KIND, STANDBY), (Receipt.KIND, STRANGER))


async def _receipts(cast_: Cast, data: bytes) -> bool:
    desk = Desk(SAMPLER, gossip={topic(topics.RECEIPTS): sealed(data, RECEIPTS)})
    loop = _sampler(cast_, desk)
    async with desk.subscribe(topic(topics.RECEIPTS), functools.partial(validate_receipt, run())) as receipts:
        await loop._read(receipts)
    return bool(desk.heard)


def receipt_seeds() -> list[bytes]:
    told = Receipt(
        accepted=b"a" * 32 + b"b" * 32,
        head=head(1).id,
        rate=2.0,
        refused=(Refusal("stale", b"x" * 32),),
        term=1,
        version=1,
    )
    return [bytes([which]) + encode(told) for which in (1, 2, 3)] + [
        b"\0" + signed(Receipt.KIND, encode(told), TRAINER)
    ]


REQUESTS: Final[Signers] = ((RolloutRequest.KIND, TRAINER), (RolloutRequest.KIND, STRANGER))


async def _rollout(cast_: Cast, data: bytes) -> bool:
    desk = Desk(SAMPLER)
    loop = _sampler(cast_, desk)
    most = limits.SMALL_BYTES + limits.ENVELOPE_BYTES
    with desk.serve(topics.ROLLOUT_STREAM, loop._answer, most=most):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop._requested.work)
            answered = await desk.ask(topics.ROLLOUT_STREAM, sealed(data, REQUESTS), TRAINER.public)
            nursery.cancel_scope.cancel()
    return answered


def _rollout_seeds() -> list[bytes]:
    asked = [RolloutRequest(count=2, first=0, head=each) for each in (head().id, bytes(32))]
    asked.append(RolloutRequest(count=4, first=8, head=head().id, taken=(0, 3)))
    return [b"\1" + encode(each) for each in asked] + [b"\2" + encode(asked[0])]


TARGETS: Final = [
    role_target("groups", "echo_node.trainer.gossip_source.GossipSource.listen", _groups, group_seeds),
    role_target(
        "deliver", "echo_node.net.outbox.direct_delivery.serve_deliveries", _deliver, _delivery_seeds
    ),
    role_target(
        "verdicts", "echo_node.trainer.verdict_listener.VerdictListener.listen", _verdicts, _verdict_seeds
    ),
    role_target(
        "witnessed",
        "echo_node.trainer.verdict_listener.StandbyVerdictListener.follow",
        _witnessed,
        _verdict_seeds,
    ),
    role_target(
        "inventory-acks", "echo_node.trainer.inventory.InventoryPublisher.listen", _acknowledged, _ack_seeds
    ),
    role_target(
        "inventories",
        "echo_node.verifier.loop.VerifierLoop._hear_inventories",
        _listed,
        _inventory_seeds,
    ),
    role_target("groups-verified", "echo_node.verifier.loop.VerifierLoop._hear", _to_verify, group_seeds),
    role_target(
        "receipts", "echo_node.rollouts.gossip_validation.validate_receipt", _receipts, receipt_seeds
    ),
    role_target(
        "rollout", "echo_node.sampler.loop.SamplerLoop._answer", _rollout, _rollout_seeds, takes=False
    ),
]
