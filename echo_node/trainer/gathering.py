"""Asynchronous push-pull: groups arrive by gossip and wait in the replay buffer until a step draws them.

It tells samplers, by receipts, what became of each group and how fast it wants more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import trio

from echo_node.admission import Admitted, Refused
from echo_node.net.base import ACCEPT, CAPACITY, IGNORE, Message, Mute, Network, Unheard, Validation
from echo_node.referring import Fetching, is_reference
from echo_node.sifting import Sieve
from echo_node.trainer.journal import KeptGroup, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay import ReplayBuffer
from echo_node.trainer.wanting import Wanting
from echo_node.trainer.wasting import Waste
from protocol import Envelope, read_batch, topics

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

USELESS: Final = "too many of its groups were of no use"
_HURRY_STEPS = 2.0
"""For so long, counted in steps, a step that waits asks for a little more; then for all there is."""
_TOGETHER = 16
"""Messages whose groups go to the disk at once, where so many wait: every commit takes its time."""


class GossipSource:
    """Batches out of whatever has arrived and is fresh enough. What is acknowledged is in the journal first."""

    def __init__(
        self,
        run: bytes,
        batch: int,
        buffer: ReplayBuffer,
        receipts: Receipts,
        judge: Callable[[Sequence[Envelope]], Awaitable[list[Admitted | Refused]]],
        release: Callable[[Admitted], None],
        journal: TrainingJournal,
        sieve: Sieve,
        fetching: Fetching | None = None,
    ) -> None:
        self._run = run
        self._batch = batch
        self._buffer = buffer
        self._receipts = receipts
        self._judge = judge
        self._release = release
        self._journal = journal
        self._sieve = sieve
        self._fetching = fetching
        self._waste = Waste(sieve.named)
        self._read: OrderedDict[bytes, Sequence[Envelope]] = OrderedDict()
        """Messages that were looked at and not yet taken, so that each is taken apart once."""
        self._judging, self._keeping = trio.Lock(), trio.Lock()
        """Who judges groups, and who finds room for them and writes them down: the next are judged while the last go to the disk.
        All pass through both in one order, so that nobody hears that a group is a second one before the first is safe."""
        self._changed = trio.Event()
        self._wanting = Wanting(batch)
        self._missing_since: float | None = None
        """When a step began to wait for groups."""
        self.bytes_in = 0
        """Of all groups that came, good or bad."""

    async def hear(self, network: Network) -> None:
        """Take in groups for as long as the trainer works."""
        topic = topics.topic(self._run, topics.GROUPS)
        async with network.subscribe(topic, self.look_at) as inbox, trio.open_nursery() as nursery:
            async for message in inbox:
                together = [message]
                while len(inbox) and len(together) < _TOGETHER:
                    together.append(await inbox.receive())
                groups = [
                    (each.sender, group)
                    for each in together
                    for group in self._envelopes(each.data)
                    if not is_reference(group)
                ]
                await nursery.start(self._take_heard, groups)

    async def _take_heard(
        self, groups: Sequence[tuple[bytes, Envelope]], task_status: TaskStatus[None]
    ) -> None:
        """Take in groups with who passed them on. It has started when they are judged, and their turn for the disk has come."""
        refused = await self._take([group for _, group in groups], task_status.started)
        for (sender, group), why in zip(groups, refused, strict=True):
            if why is not None:
                self._note(sender, group, why)

    async def take(self, message: Message) -> bytes:
        """Groups that were delivered by hand, long ones by reference, and a receipt for who did, should that by gossip be lost."""
        groups: Sequence[Envelope] = self._envelopes(message.data)
        if any(map(is_reference, groups)):
            if self._fetching is None:
                groups = [group for group in groups if not is_reference(group)]
            else:
                groups = await self._fetching.groups_of(message.data, message.sender)
        for group, why in zip(groups, await self._take(groups), strict=True):
            if why is not None and not self._receipts.has_taken(
                group.id
            ):  # else it was a receipt that got lost
                self._note(message.sender, group, why)
        return self._receipts.answer(envelope.id for envelope in groups)

    async def next_batch(self, step: int, *, patience: float = math.inf) -> tuple[Admitted, ...]:
        """A batch for the policy at this step, as soon as there is one; nothing, when no group has come for so long, or
        none but of engine classes that have their part of it already.
        """
        lacking_since = math.inf
        while True:
            await self._drop(self._buffer.expire(step), "stale")
            if drawn := self._buffer.draw(self._batch, step):
                self._missing_since = None
                return drawn
            changed = self._changed
            await self._drop(self._buffer.make_room(), "unverified")
            now = trio.current_time()
            lacking_since = min(lacking_since, now) if self._buffer.lacks_other_classes else math.inf
            with trio.move_on_at(min(now, lacking_since) + patience) as waiting:
                await self._hurry(changed)
            if waiting.cancelled_caught:
                return ()

    async def _hurry(self, changed: trio.Event) -> None:
        """Wait for a change. Where it is groups that are missing, more are asked for: a few at first, then all there are."""
        if self._buffer.is_short:  # else it is others that are waited for
            now = trio.current_time()
            self._missing_since = now if self._missing_since is None else self._missing_since
            until = self._missing_since + _HURRY_STEPS * (self._wanting.seconds or 0.0)
            self._receipts.rate = self._wanting.starving() if now < until else None
            with trio.move_on_at(until) if now < until else nullcontext():
                await changed.wait()
            if not changed.is_set():
                self._receipts.rate = None
        await changed.wait()

    @property
    def hindrance(self) -> str | None:
        """What, other than a lack of groups, keeps a batch from being drawn, in words."""
        return self._buffer.hindrance

    def wake(self) -> None:
        """Something has changed that may let a batch be drawn."""
        self._changed.set()
        self._changed = trio.Event()

    def stepped(self, seconds: float, samplers: int) -> None:
        """A step has taken so long, without the wait for its batch: tell the samplers the pace that would feed it."""
        self._receipts.rate = self._wanting.stepped(seconds, samplers, len(self._buffer))

    def look_at(self, message: Message) -> Validation:
        """What whoever passed groups on could have seen is held against it; what is stale or double is not."""
        if self._waste.is_spent(message.sender) and message.sender not in self._sieve.named:
            return Unheard(USELESS)
        said, envelopes = self._sieve.sift(message)
        if said is not ACCEPT:
            self._waste.handed(message.sender, "not-in-roster", len(envelopes))
            return said
        if all(self._waste.is_spent(envelope.signer) for envelope in envelopes):
            return IGNORE
        self._read[message.data] = envelopes
        if len(self._read) > CAPACITY:
            self._read.popitem(last=False)
        return ACCEPT

    def unheard(self) -> Mapping[bytes, Mute]:
        """Whose groups are not looked at for now, since so many were of no use."""
        return self._waste.spent()

    def _note(self, sender: bytes, group: Envelope, refused: Refused) -> None:
        """Somebody has used up some of our time. That there is no room here is nobody's fault."""
        if refused.reason != "full":
            signer = group.signer if refused.signed else None
            self._waste.refused(refused.id, refused.reason, sender=sender, signer=signer)

    def _envelopes(self, data: bytes) -> list[Envelope]:
        """The groups of a message, without those of samplers that are not looked at for now, whoever handed them over."""
        envelopes = self._read.pop(data, None) or read_batch(data)
        return [envelope for envelope in envelopes if not self._waste.is_spent(envelope.signer)]

    async def _take(
        self, groups: Sequence[Envelope], judged: Callable[[], None] = lambda: None
    ) -> list[Refused | None]:
        """Keep groups and answer their samplers; returns for each why not, or nothing. `judged` hears when others may be."""
        self.bytes_in += sum(len(envelope.sealed) for envelope in groups)
        async with self._judging:
            found = await self._judge(groups)
            try:
                await self._keeping.acquire()
            except trio.Cancelled:  # who delivered them has gone: they will come again
                for each in found:
                    if isinstance(each, Admitted):
                        self._release(each)
                raise
        try:
            judged()
            good, refused = self._find_room(found)
            await self._keep(good)
        finally:
            self._keeping.release()
        if self._wanting.seconds is None:
            self._receipts.rate = self._wanting.starting(len(self._buffer), self._buffer.samplers)
        if good or any(each is not None and each.reason == "full" for each in refused):
            self.wake()
        return refused

    def _find_room(self, judged: Sequence[Admitted | Refused]) -> tuple[list[Admitted], list[Refused | None]]:
        """Those that are kept; and of each why it is not, or nothing."""
        good: list[Admitted] = []
        refused: list[Refused | None] = []
        for each in judged:
            if isinstance(each, Refused):
                refused.append(each)
                if each.signed:
                    self._receipts.refuse(each.id, each.reason)
            elif self._buffer.reserve(each.group.signer, each.group.message.engine):
                refused.append(None)
                good.append(each)
            else:
                refused.append(Refused(each.group.id, "full", "there is no room for it", signed=True))
                self._release(each)
                self._receipts.refuse(each.group.id, "full")
        return good, refused

    async def _keep(self, groups: Sequence[Admitted]) -> None:
        """Write groups down, and only then have them wait and say so. Where that fails, their slots are free again."""
        past = frozenset[bytes]()
        try:
            if groups:
                past = await self._journal.keep([KeptGroup.of(each.group, each.step) for each in groups])
        except BaseException:  # the disk is full, or who delivered them has gone: they will come again
            for each in groups:
                self._release(each)
            raise
        finally:
            self._buffer.reserved.clear()
        for each in groups:
            if each.group.id in past:  # another trainer used it, and said that it was of another slot
                self._receipts.refuse(each.group.id, "duplicate")
                continue
            self._buffer.put(each)
            self._receipts.accept(each.group.id)

    async def _drop(self, groups: Sequence[Admitted], reason: str) -> None:
        if groups:
            await self._journal.drop({group.group.id: reason for group in groups})
