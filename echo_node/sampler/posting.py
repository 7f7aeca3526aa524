"""A sampler's groups on their way to whoever leads: on disk before they are sent, sent until a receipt names them.

What was acknowledged is kept until it is too stale to be used, since a new leader may not have it. What is too stale is sent
no more. After a restart everything that is still fresh goes out again, and slots go on where they stopped. A group that is
too long waits among what the store lends, and a reference goes in its place. It fills no slot.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.item import LONGEST, Item
from echo_node.net.outbox.outbox import Outbox, OutboxFullError
from echo_node.net.outbox.redelivery import Redelivery
from echo_node.referring import is_reference, refer_to
from echo_node.weights import disk
from echo_node.weights.blobfolder import BlobFolder
from echo_node.weights.hearing import Hearing
from protocol import (
    Envelope,
    GroupReference,
    Identity,
    Opened,
    Receipt,
    TrajectoryGroup,
    WeightsHead,
    fill_batches,
    open_sealed,
    topics,
)

log = logging.getLogger(__name__)
FOR_NOW: Final = frozenset({"full"})
"""Reasons for a refusal that may pass: such groups are sent again as long as they are fresh."""
FULL_SECONDS: Final = 60.0
"""Between two words about an outbox that is full."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Posted:
    """What is remembered of a group: under which head it was drawn, its slot, and the blob that it is, if it is long."""

    head: bytes
    slot: int
    blob: bytes | None


class Post:
    """The outgoing groups of one sampler. `staleness` is the run's bound, in steps."""

    def __init__(
        self,
        run: bytes,
        network: Network,
        identity: Identity,
        outbox: Outbox,
        chain: Hearing,
        blobs: BlobFolder,
        *,
        staleness: int,
        longest: int = LONGEST,
        patience: Patience | None = None,
        luck: random.Random | None = None,
        told: Callable[[Receipt], Awaitable[None]] | None = None,
    ) -> None:
        """`told` hears every receipt that counts."""
        self._run = run
        self._identity = identity
        self._blobs = blobs
        self._longest = longest
        self._outbox = outbox
        self._chain = chain
        self._staleness = staleness
        self._told = told
        self._posted: dict[bytes, _Posted] = {}
        self._redelivery = Redelivery(
            network,
            outbox,
            recipients=lambda: [chain.leader],
            pack=lambda _topic, data: fill_batches(data),
            heard=self._hear,
            patience=patience,
            luck=luck,
        )

    @property
    def waiting(self) -> int:
        """Groups that no receipt has named yet."""
        return self._outbox.pending

    async def start(self) -> None:
        """Remember what is on disk. Who led when it was acknowledged is not known any more, so all of it is sent again."""
        await self._outbox.revive()
        waiting, _ = self._outbox.since(0)
        for item in await self._outbox.read(waiting):
            self._note(item.id, Envelope.parse(item.data))

    async def run(self) -> None:
        """Send, and let go of what has grown stale, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._redelivery.run)
            nursery.start_soon(self._keep_up)

    def next_slot(self, head: bytes) -> int:
        """The first slot under a head that was not posted yet."""
        return max((each.slot + 1 for each in self._posted.values() if each.head == head), default=0)

    async def put(self, sealed: Sequence[bytes]) -> list[bytes]:
        """Have these groups delivered; returns their ids. They are on disk when it returns."""
        groups = {envelope.id: envelope for envelope in map(Envelope.parse, sealed)}
        topic = topics.topic(self._run, topics.GROUPS)
        sent = {group: await self._short(envelope) for group, envelope in groups.items()}
        items = [Item(group, topic, envelope.sealed) for group, envelope in sent.items()]
        while True:
            try:
                await self._outbox.put(items)
            except OutboxFullError as error:
                log.warning("no more groups are made for now: %s", error)
                with trio.move_on_after(FULL_SECONDS):
                    await self._outbox.wait_for_room(len(items), sum(len(item.data) for item in items))
            else:
                break
        for item in items:
            self._note(item.id, sent[item.id])
        return list(groups)

    async def settle(self, receipt: Opened[Receipt]) -> None:
        """Take note of a receipt, if it is of who leads now. Most of it is about others' groups."""
        tip = self._chain.tip
        if receipt.signer != self._chain.leader or (tip and receipt.message.term < tip.message.term):
            return
        await self._outbox.acknowledge(receipt.message.accepted_ids())
        refused = {group: why for group, why in receipt.message.refused_ids() if why not in FOR_NOW}
        await self._let_go(await self._outbox.refuse(refused))
        if self._told is not None:
            await self._told(receipt.message)

    async def _short(self, group: Envelope) -> Envelope:
        """What is sent: the group, or a reference to it, once it can be fetched."""
        if len(group.sealed) <= self._longest:
            return group

        def keep() -> None:
            self._blobs.put(group.sealed)
            self._blobs.sync()

        await trio.to_thread.run_sync(keep)
        return Envelope.parse(refer_to(group, self._identity, self._run))

    def _note(self, group: bytes, sent: Envelope) -> None:
        if is_reference(sent):
            reference = sent.claim(GroupReference, self._run)
            self._posted[group] = _Posted(reference.head, reference.slot, reference.blob)
        else:
            told = sent.claim(TrajectoryGroup, self._run)
            self._posted[group] = _Posted(told.heads[0], told.slot, None)

    async def _let_go(self, groups: Iterable[bytes]) -> None:
        """These are sent no more, whatever comes."""
        gone = [self._posted.pop(group) for group in groups if group in self._posted]
        paths = [self._blobs.path(each.blob) for each in gone if each.blob is not None]

        def remove() -> None:
            for path in paths:
                disk.remove(path)

        if paths:
            await trio.to_thread.run_sync(remove)

    async def _hear(self, _peer: bytes, answer: bytes) -> None:
        """An answer to what was delivered by hand."""
        receipt = open_sealed(answer, Receipt, self._run)
        if receipt.signer != self._chain.leader:
            raise PeerError("a receipt of somebody who does not lead")
        await self.settle(receipt)

    async def _keep_up(self) -> None:
        """With each head: a new term has a new leader, who may lack what the old one had; and some groups are too old now."""
        head: Opened[WeightsHead] | None = None
        while True:
            before, head = head, await self._chain.wait_for_newer(head.id if head else None)
            if before is not None and head.message.term != before.message.term:
                self._redelivery.reroute()
                await self._outbox.revive()
            old = {group for group, each in self._posted.items() if self._is_stale(each, head.message.step)}
            await self._outbox.refuse(dict.fromkeys(old, "stale"))
            await self._outbox.forget(old)
            await self._let_go(old)

    def _is_stale(self, posted: _Posted, step: int) -> bool:
        """Heads that are not known any more were left behind long ago, or by a new term."""
        drawn_under = self._chain.find(posted.head)
        return drawn_under is None or step - drawn_under.message.step > self._staleness
