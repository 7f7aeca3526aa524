"""Delivery of groups to the leader: kept on disk, resent until a receipt.

An acknowledged group is kept until it is stale, since a new leader may not have it; a stale group
is not sent again. After a restart everything still fresh is resent, and slot numbers continue. A
group too large for a message is kept as a blob, and a reference is sent in its place.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import trio

from echo_node.errors import DefectError, PeerError
from echo_node.net.base import Network
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.outbox import LONGEST, Item, Outbox, OutboxFullError
from echo_node.net.outbox.redelivery import Redelivery
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.rollouts.group_refs import fetch_seconds, is_reference, refer_to
from echo_node.rollouts.record import RolloutRecord
from echo_node.storage import files
from echo_node.storage.blob_dir import BlobDir
from echo_node.weights.chain_follower import ChainFollower
from protocol import (
    Envelope,
    GroupReference,
    Identity,
    Opened,
    Receipt,
    SlotAnnouncement,
    TrajectoryGroup,
    WeightsHead,
    fill_batches,
    limits,
    open_sealed,
    read_batch,
    seal,
    topics,
)

log = logging.getLogger(__name__)
FOR_NOW: Final = frozenset({"full"})
"""Temporary refusals: such groups are resent as long as they are fresh."""
FULL_SECONDS: Final = 60.0
"""Seconds between two warnings about a full outbox."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Posted:
    """A group in the outbox: head, slot, and blob if sent by reference."""

    head: bytes
    slot: int
    blob: bytes | None


class GroupDelivery:
    """Outgoing groups of one sampler.

    `staleness` is the run's bound, in steps; `on_receipt` receives every receipt that counts.
    """

    def __init__(
        self,
        run: bytes,
        network: Network,
        identity: Identity,
        outbox: Outbox,
        chain: ChainFollower,
        blobs: BlobDir,
        *,
        staleness: int,
        longest: int = LONGEST,
        patience: Patience | None = None,
        luck: random.Random | None = None,
        on_receipt: Callable[[Receipt], Awaitable[None]] | None = None,
    ) -> None:
        self._run = run
        self._identity = identity
        self._blobs = blobs
        self._longest = longest
        self._outbox = outbox
        self._chain = chain
        self._staleness = staleness
        self._on_receipt = on_receipt
        self._posted: dict[bytes, _Posted] = {}
        self._announcements: dict[bytes, tuple[bytes, int]] = {}
        """Head and end of the announced slots, by the id of the announcement."""
        self._redelivery = Redelivery(
            network,
            outbox,
            recipients=lambda: [chain.leader],
            pack=lambda _topic, data: fill_batches(data),
            on_response=self._on_answer,
            patience=patience,
            luck=luck,
            extra_seconds=self._fetch_seconds,
        )

    @property
    def waiting(self) -> int:
        """Groups that no receipt has named yet."""
        return self._outbox.pending - sum(map(self._outbox.is_pending, self._announcements))

    async def start(self) -> None:
        """Load the outbox; everything is resent, since the leader may have changed."""
        await self._outbox.revive()
        waiting, _ = self._outbox.since(0)
        for item in await self._outbox.read(waiting):
            envelope = Envelope.parse(item.data)
            if is_announcement(envelope):
                message = envelope.claim(SlotAnnouncement, self._run)
                self._announcements[item.id] = message.head, message.first + message.count
            else:
                self._posted[item.id] = self._read_posted(envelope)

    async def run(self) -> None:
        """Send groups and drop stale ones, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._redelivery.run)
            nursery.start_soon(self._follow_chain)

    def next_slot(self, head: bytes) -> int:
        """Return the first slot under a head that was neither announced nor posted yet."""
        posted = max((each.slot + 1 for each in self._posted.values() if each.head == head), default=0)
        return max(posted, self._announced_until(head))

    def unposted(self, head: bytes) -> list[int]:
        """Return the announced slots under a head of which no group was posted, ascending."""
        posted = {each.slot for each in self._posted.values() if each.head == head}
        return [slot for slot in range(self._announced_until(head)) if slot not in posted]

    def _announced_until(self, head: bytes) -> int:
        return max((until for under, until in self._announcements.values() if under == head), default=0)

    async def announce(self, head: bytes, slots: range) -> None:
        """Announce slots that are about to be drawn, each once.

        The announcement is on its way while they are drawn, so nothing waits for it. After a
        restart slots that were announced and not posted are drawn again, and are the same.
        """
        first = self._announced_until(head)
        while (first := max(first, slots.start)) < slots.stop:
            count = min(limits.ANNOUNCED, slots.stop - first)
            sealed = seal(SlotAnnouncement(count=count, first=first, head=head), self._identity, self._run)
            item = Item(Envelope.parse(sealed).id, topics.topic(self._run, topics.GROUPS), sealed)
            await self._put([item])
            first += count
            self._announcements[item.id] = head, first

    async def put(self, groups: Sequence[RolloutRecord]) -> list[bytes]:
        """Queue groups for delivery, on disk, and return their ids."""
        topic = topics.topic(self._run, topics.GROUPS)
        posted, items = [], []
        for group in groups:
            data, blob = await self._as_sent(group)
            items.append(Item(group.id, topic, data))
            posted.append(_Posted(group.head, group.slot, blob))
        await self._put(items)
        self._posted |= {item.id: each for item, each in zip(items, posted, strict=True)}
        return [item.id for item in items]

    async def _put(self, items: Sequence[Item]) -> None:
        """Put items into the outbox, once there is room."""
        while True:
            try:
                await self._outbox.put(items)
            except OutboxFullError as error:
                log.warning("generation waits for room in the outbox: %s", error)
                with trio.move_on_after(FULL_SECONDS):
                    await self._outbox.wait_for_room(len(items), sum(len(item.data) for item in items))
            else:
                return

    async def settle(self, receipt: Opened[Receipt]) -> None:
        """Apply a receipt of the current leader to the groups that it names."""
        tip = self._chain.tip
        if receipt.signer != self._chain.leader or (tip and receipt.message.term < tip.message.term):
            return
        await self._outbox.acknowledge((*receipt.message.accepted_ids(), *receipt.message.announced_ids()))
        refused = {group: why for group, why in receipt.message.refused_ids() if why not in FOR_NOW}
        await self._drop(await self._outbox.refuse(refused))
        if self._on_receipt is not None:
            await self._on_receipt(receipt.message)

    async def _as_sent(self, group: RolloutRecord) -> tuple[bytes, bytes | None]:
        """Return the group's bytes, or a reference and the stored blob if too long."""
        sealed = group.sealed
        if sealed is None:
            raise DefectError("a group without its bytes came to be delivered")
        if len(sealed) <= self._longest:
            return sealed, None

        def keep() -> bytes:
            blob = self._blobs.put(sealed)
            self._blobs.sync()
            return blob

        blob = await trio.to_thread.run_sync(keep)
        return refer_to(group, self._identity, self._run), blob

    def _fetch_seconds(self, message: bytes) -> float:
        """Return the seconds that the leader may need to fetch what a message refers to."""
        references = [each for each in read_batch(message) if is_reference(each)]
        sizes = [each.claim(GroupReference, self._run).size for each in references]
        return fetch_seconds(sum(sizes)) if sizes else 0.0

    def _read_posted(self, sent: Envelope) -> _Posted:
        """Return the place of a group that an earlier process has put here."""
        if is_reference(sent):
            reference = sent.claim(GroupReference, self._run)
            return _Posted(reference.head, reference.slot, reference.blob)
        message = sent.claim(TrajectoryGroup, self._run)
        return _Posted(message.heads[0], message.slot, None)

    async def _drop(self, groups: Iterable[bytes]) -> None:
        """Forget what is never sent again, and delete the groups' blobs."""
        groups = list(groups)
        for each in groups:
            self._announcements.pop(each, None)
        gone = [self._posted.pop(group) for group in groups if group in self._posted]
        paths = [self._blobs.path(each.blob) for each in gone if each.blob is not None]

        def remove() -> None:
            for path in paths:
                files.remove(path)

        if paths:
            await trio.to_thread.run_sync(remove)

    async def _on_answer(self, _peer: bytes, answer: bytes) -> None:
        """Apply the receipt that answers a direct delivery."""
        receipt = open_sealed(answer, Receipt, self._run)
        if receipt.signer != self._chain.leader:
            raise PeerError("the receipt is not signed by the leader")
        await self.settle(receipt)

    async def _follow_chain(self) -> None:
        """Resend to the new leader of each term; drop groups that became stale."""
        head: Opened[WeightsHead] | None = None
        while True:
            before, head = head, await self._chain.wait_for_newer(head.id if head else None)
            if before is not None and head.message.term != before.message.term:
                self._redelivery.reroute()
                await self._outbox.revive()
            step = head.message.step
            old = {group for group, each in self._posted.items() if self._is_stale(each.head, step)}
            past = {each for each, (under, _) in self._announcements.items() if self._is_stale(under, step)}
            await self._outbox.refuse(dict.fromkeys(old | past, "stale"))
            await self._outbox.forget(old)
            await self._outbox.forget(past, record=False)  # groups alone count as delivered
            await self._drop(old | past)

    def _is_stale(self, head: bytes, step: int) -> bool:
        """Return whether a group is too old.

        An unknown head is old, or was lost to a new term.
        """
        drawn_under = self._chain.find(head)
        return drawn_under is None or step - drawn_under.message.step > self._staleness
