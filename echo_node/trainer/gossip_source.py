"""Asynchronous mode: gossiped groups wait in the replay buffer to be drawn.

Receipts tell samplers what became of each group, and how many groups a second are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import trio

from echo_node.net.base import ACCEPT, IGNORE, Message, Network, SenderMuted, Validation
from echo_node.rollouts.admission import GroupFilter, Refused
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.rollouts.group_refs import GroupRefFetcher, is_reference
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer.batch_source import BatchRequest, NoBatchError
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.rate_control import RateControl
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.sender_quota import USELESS, SenderQuota
from protocol import Envelope, topics

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

_HURRY_STEPS = 2.0
"""Steps for which a waiting step asks for a little more, before it asks for all."""
_TOGETHER = 16
"""Most messages whose groups are written in one commit, which is slow."""


class GossipSource:
    """Batches of groups that have arrived and are fresh enough.

    A group is in the journal before it is acknowledged.
    """

    def __init__(
        self,
        run: bytes,
        batch: int,
        buffer: ReplayBuffer,
        receipts: Receipts,
        admission: GroupFilter,
        journal: TrainingJournal,
        validator: GossipValidator,
        quota: SenderQuota,
        fetcher: GroupRefFetcher | None = None,
    ) -> None:
        self._run = run
        self._batch = batch
        self._buffer = buffer
        self._receipts = receipts
        self._admission = admission
        self._journal = journal
        self._validator = validator
        self._fetcher = fetcher
        self._quota = quota
        self._judging, self._keeping = trio.Lock(), trio.Lock()
        """Locks for admission and for reservation with the write to disk.

        The next groups are admitted while the last go to the disk. All pass through both locks in
        one order, so that no sampler is answered "duplicate" before the first copy is safe.
        """
        self._rate = RateControl(batch)
        self._missing_since: float | None = None
        """Time at which a step began to wait for groups."""
        self.bytes_in = 0
        """Bytes of all groups that came, admitted or not."""

    async def listen(self, network: Network) -> None:
        """Receive gossiped groups until cancelled."""
        topic = topics.topic(self._run, topics.GROUPS)
        async with network.subscribe(topic, self.validate) as inbox, trio.open_nursery() as nursery:
            async for message in inbox:
                together = [message]
                while len(inbox) and len(together) < _TOGETHER:
                    together.append(await inbox.receive())
                groups = [
                    (each.sender, group)
                    for each in together
                    for group in self._without_announcements(each.sender, self._envelopes(each.data))[0]
                    if not is_reference(group)
                ]
                await nursery.start(self._take_gossiped, groups)

    async def _take_gossiped(
        self, groups: Sequence[tuple[bytes, Envelope]], task_status: TaskStatus[None]
    ) -> None:
        """Take in gossiped groups, each with the peer that forwarded it.

        The task counts as started once the groups are admitted and their turn for the disk has
        come.
        """
        refused = await self._take([group for _, group in groups], task_status.started)
        for (sender, group), why in zip(groups, refused, strict=True):
            if why is not None:
                self._blame(sender, group, why)

    async def take(self, message: Message) -> bytes:
        """Take in delivered groups, large ones by reference, and return a receipt.

        The receipt goes back to the peer that delivered them, should the gossiped one be lost.
        """
        envelopes = self._envelopes(message.data)
        groups: Sequence[Envelope]
        groups, announced = self._without_announcements(message.sender, envelopes)
        if any(map(is_reference, groups)):
            if self._fetcher is None:
                groups = [group for group in groups if not is_reference(group)]
            else:
                is_accepted = self._admission.accepts_from(message.sender)
                groups = await self._fetcher.groups_of(groups, message.sender, is_accepted=is_accepted)
        for group, why in zip(groups, await self._take(groups), strict=True):
            # A group that was taken comes again when its receipt got lost.
            if why is not None and not self._receipts.has_taken(group.id):
                self._blame(message.sender, group, why)
        return self._receipts.answer((envelope.id for envelope in groups), announced)

    @property
    def progress(self) -> str | None:
        """Return how far the batch is that is waited for, in words; None if none is."""
        if self._missing_since is None:
            return None
        return f"{min(len(self._buffer), self._batch)} of {self._batch} groups have arrived"

    async def next_batch(self, request: BatchRequest) -> tuple[RolloutRecord, ...]:
        """Return a batch for the policy at a step as soon as there is one.

        Raise `NoBatchError` when no group has come within the patience, or none but of engine
        classes that have their share of the batch already.
        """
        step, patience = request.step, request.patience
        lacking_since = math.inf
        while True:
            await self._drop(self._buffer.expire(step), "stale")
            if batch := self._buffer.draw(request.count or self._batch, step):
                self._missing_since = None
                return batch
            seen = self._buffer.changed.count
            await self._drop(self._buffer.make_room(), "unverified")
            now = trio.current_time()
            lacking_since = min(lacking_since, now) if self._buffer.lacks_other_classes else math.inf
            with trio.move_on_at(min(now, lacking_since) + patience) as waiting:
                await self._wait_hurrying(seen)
            if waiting.cancelled_caught:
                reason = self._buffer.hindrance or f"no group has come for {patience:.0f} s"
                raise NoBatchError(reason)

    async def _wait_hurrying(self, seen: int) -> None:
        """Wait for a change; if groups are missing, ask for a few more, then for all."""
        changed = self._buffer.changed
        if self._buffer.is_short:  # else verdicts or other engine classes are missing
            now = trio.current_time()
            self._missing_since = now if self._missing_since is None else self._missing_since
            until = self._missing_since + _HURRY_STEPS * (self._rate.seconds or 0.0)
            self._receipts.set_rate(self._rate.starving() if now < until else None)
            with trio.move_on_at(until) if now < until else nullcontext():
                await changed.wait(since=seen)
            if changed.count == seen:
                self._receipts.set_rate(None)
        await changed.wait(since=seen)

    def stepped(self, seconds: float, samplers: int) -> None:
        """Set the samplers' rate after a step that took so long, without its wait."""
        self._receipts.set_rate(self._rate.stepped(seconds, samplers, len(self._buffer)))

    def validate(self, message: Message) -> Validation:
        """Validate a gossiped message: blame its sender for what the sender could check.

        Stale and duplicate groups are not the sender's fault.
        """
        if self._quota.is_muted(message.sender) and message.sender not in self._validator.named:
            return SenderMuted(USELESS)
        validation, envelopes = self._validator.validate(message)
        if validation is not ACCEPT:
            self._quota.handed(message.sender, "not-in-roster", len(envelopes))
            return validation
        if all(self._quota.is_muted(envelope.signer) for envelope in envelopes):
            self._validator.take(message.data)
            return IGNORE
        return ACCEPT

    def _blame(self, sender: bytes, group: Envelope, refused: Refused) -> None:
        """Count a refused group against a peer; a full buffer is nobody's fault."""
        if refused.reason != "full":
            signer = group.signer if refused.signed else None
            self._quota.refused(refused.id, refused.reason, sender=sender, signer=signer)

    def _envelopes(self, data: bytes) -> list[Envelope]:
        """Return the groups of a message, without those of samplers that are muted."""
        envelopes = self._validator.take(data)
        return [envelope for envelope in envelopes if not self._quota.is_muted(envelope.signer)]

    def _without_announcements(
        self, sender: bytes, envelopes: Sequence[Envelope]
    ) -> tuple[list[Envelope], list[bytes]]:
        """Take in the announcements of slots in a message, and answer them.

        Return the rest of it, and the ids of the announcements that were taken.
        """
        taken = []
        for envelope in filter(is_announcement, envelopes):
            refused = self._admission.announce(envelope)
            if refused is None:
                self._receipts.take_announcement(envelope.id)
                taken.append(envelope.id)
                continue
            self._blame(sender, envelope, refused)
            if refused.signed:
                self._receipts.refuse(envelope.id, refused.reason)
        return [envelope for envelope in envelopes if not is_announcement(envelope)], taken

    async def _take(
        self, groups: Sequence[Envelope], judged: Callable[[], None] = lambda: None
    ) -> list[Refused | None]:
        """Keep groups and answer their samplers; return for each the refusal, or None.

        `judged` is called when the next groups may be admitted.
        """
        self.bytes_in += sum(len(envelope.sealed) for envelope in groups)
        async with self._judging:
            found = await self._admission.judge_all(groups)
            try:
                await self._keeping.acquire()
            except trio.Cancelled:  # the peer that delivered them is gone, and sends them again
                for each in found:
                    if isinstance(each, RolloutRecord):
                        self._admission.release(each)
                raise
        try:
            judged()
            good, refused = self._find_room(found)
            await self._keep(good)
        finally:
            self._keeping.release()
        if self._rate.seconds is None:
            self._receipts.set_rate(self._rate.starting(len(self._buffer), self._buffer.samplers))
        if good or any(each is not None and each.reason == "full" for each in refused):
            self._buffer.changed.notify()
        return refused

    def _find_room(
        self, judged: Sequence[RolloutRecord | Refused]
    ) -> tuple[list[RolloutRecord], list[Refused | None]]:
        """Return the groups that are kept, and for each group the refusal, or None."""
        good: list[RolloutRecord] = []
        refused: list[Refused | None] = []
        for each in judged:
            if isinstance(each, Refused):
                refused.append(each)
                if each.signed:
                    self._receipts.refuse(each.id, each.reason)
            elif self._buffer.reserve(each.sampler, each.message.engine):
                refused.append(None)
                good.append(each)
            else:
                refused.append(Refused(each.id, "full", "there is no room for it", signed=True))
                self._admission.release(each)
                self._receipts.refuse(each.id, "full")
        return good, refused

    async def _keep(self, groups: Sequence[RolloutRecord]) -> None:
        """Write groups to the journal, then buffer and acknowledge them.

        If the write fails, their slots are free again.
        """
        past = frozenset[bytes]()
        try:
            if groups:
                past = await self._journal.keep(groups)
        except BaseException:  # disk full, or the peer is gone: they come again
            for each in groups:
                self._admission.release(each)
            raise
        finally:
            self._buffer.clear_reservations()
        for each in groups:
            if each.id in past:  # another trainer used it for another slot
                self._receipts.refuse(each.id, "duplicate")
                continue
            self._buffer.put(each)
            self._receipts.accept(each.id)

    async def _drop(self, groups: Sequence[RolloutRecord], reason: str) -> None:
        if groups:
            await self._journal.drop({group.id: reason for group in groups})
