"""Publish weights heads: sign the next version, seed its blobs, announce it.

A head commits to the batches that were learnt from since the one before, and carries the roster of
samplers that may sample under it. Encoding, hashing and storing run beside the steps: the weights
are read where they are, chunk by chunk, and the next update waits until that is done.

    begin       which batches, which roster; from now on batches are of the version after it
    sign        blobs and head on disk, synced: from now on there is this version
    announce    served and gossiped: samplers may be asked for its slots
    activate    the store's state is that of the head; old versions are pruned
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from echo_node.errors import DefectError, StoreError
from echo_node.net.base import Network
from echo_node.rollouts.admission import Admission
from echo_node.runs.run import Run
from echo_node.trainer.journal import Batch
from echo_node.trainer.provenance import provenance_record_of
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.step import TrainStep
from echo_node.weights.flat_view import ReadableState
from echo_node.weights.provenance_record import provenance_ext
from echo_node.weights.publisher import Publisher, SignedVersion
from echo_node.weights.seeding import WeightsSeeder
from protocol import Opened, Roster, WeightsHead, topics


@dataclass(eq=False, slots=True)
class HeadInProgress:
    """A head that is being published."""

    version: int
    term: int
    step: int
    state: ReadableState
    """The weights, which must not change until they are `read`."""
    roster: Roster
    batches: tuple[Batch, ...]
    signed: SignedVersion | None = None
    announced: trio.Event = field(default_factory=trio.Event)
    read: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when nothing is done for it any more, also after a failure."""

    @contextmanager
    def under_way(self) -> Generator[None]:
        """Mark the end of the work on it, however that comes."""
        try:
            yield
            self.read.set()
        finally:
            self.ended.set()


class HeadPublisher:
    """The heads of one trainer, from its step to the network."""

    def __init__(
        self,
        run: Run,
        network: Network,
        step: TrainStep,
        publisher: Publisher,
        seeder: WeightsSeeder,
        joins: RosterBuilder,
        admission: Admission,
        receipts: Receipts,
    ) -> None:
        self._run = run
        self._network = network
        self._step = step
        self._publisher = publisher
        self._seeder = seeder
        self._joins = joins
        self._admission = admission
        self._receipts = receipts
        self._unpublished: list[Batch] = []
        """Batches learnt from since the last head, to which the next one commits."""
        self._own: Opened[WeightsHead] | None = None
        """The newest head that this trainer signed, or began with."""
        self._in_progress: HeadInProgress | None = None
        self.roster = Roster(())
        """Roster of the newest head."""

    @property
    def tip(self) -> Opened[WeightsHead]:
        """Return the newest head."""
        if (tip := self._publisher.tip) is None:
            raise DefectError("a step before anything was published")
        return tip

    @property
    def version(self) -> int:
        """Return the version of the newest head, be it signed or still in progress."""
        under_way = self._in_progress
        return self.tip.message.version if under_way is None else under_way.version

    @property
    def is_settled(self) -> bool:
        """Return whether all that was learnt is signed, and this trainer has the tip."""
        ours = self._own is not None and self._own.id == self.tip.id
        under_way = self._in_progress
        return ours and not self._unpublished and (under_way is None or under_way.signed is not None)

    @property
    def is_due(self) -> bool:
        """Return whether a head must be published for what was learnt since the last one.

        In sequential mode a batch is of its own version, so every step has a head. Else the
        manifest says how often; and a head is published before the newest one is too stale to be
        sampled under.
        """
        if not self._unpublished:
            return False
        tip = self.tip.message
        too_old = self._step.version - tip.step > self._run.manifest.sync.staleness
        is_async = self._run.is_async(tip.version)
        return not is_async or too_old or len(self._unpublished) >= self._run.manifest.sync.head_every

    def add(self, batch: Batch) -> None:
        """Commit the next head to a batch that was learnt from."""
        self._unpublished.append(batch)

    def recover(self, roster: Roster) -> None:
        """Go on with the roster of the newest head, after a restart."""
        self.roster = roster
        self._joins.take_over(roster)

    async def flush(self) -> None:
        """Publish a head for what was learnt since the last one, if anything was."""
        if self._unpublished:
            await self.publish()

    async def publish(self) -> Opened[WeightsHead]:
        """Publish the next version from beginning to end, after one in progress."""
        head = await self.begin()
        with head.under_way():
            signed = await self.sign(head)
            await self.announce(signed)
            head.announced.set()
            await self.activate(head)
        return signed

    async def begin(self) -> HeadInProgress:
        """Begin to publish what was learnt since the last head, after one in progress."""
        await self.wait_read()
        state = await trio.to_thread.run_sync(self._step.published_state)
        newest = self._publisher.tip
        self._in_progress = HeadInProgress(
            version=0 if newest is None else newest.message.version + 1,
            term=self._publisher.store.follower.term,
            step=self._step.version,
            state=state,
            roster=self._joins.roster(),
            batches=tuple(self._unpublished),
        )
        self._unpublished.clear()
        return self._in_progress

    async def sign(self, head: HeadInProgress) -> Opened[WeightsHead]:
        """Write and sign a version, also when the trainer is cancelled meanwhile.

        If another trainer leads since, nothing is signed.
        """
        with trio.CancelScope(shield=True):  # the disk alone is waited for
            head.signed = await trio.to_thread.run_sync(self._sign, head)
        if head.signed is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise StoreError(f"another trainer leads since term {head.term}: nothing was signed")
        self._own, self.roster = head.signed.head, head.roster
        self._admission.published(self._own, self.roster)
        return self._own

    async def announce(self, head: Opened[WeightsHead]) -> None:
        """Seed the blobs of a head, name it in receipts from now on, and gossip it."""
        for route in head.message.routes:
            self._seeder.announce_held(route.table)
        self._own = head
        self._receipts.set_head(head)
        await self._network.publish(topics.topic(self._run.id, topics.HEADS), head.sealed)

    async def activate(self, head: HeadInProgress) -> None:
        """Make a signed version the active one of the store, and prune old ones."""
        await trio.to_thread.run_sync(self._activate, head)

    async def wait_announced(self) -> None:
        """Wait until the newest head is announced."""
        if self._in_progress is not None:
            await self._in_progress.announced.wait()

    async def wait_read(self) -> None:
        """Wait until the weights may change: nobody reads them any more to publish them."""
        if self._in_progress is not None:
            await self._in_progress.read.wait()
            self._in_progress = None

    async def wait_ended(self, seconds: float) -> None:
        """Wait for the end of a head in progress, although the trainer is cancelled."""
        if self._in_progress is not None:
            with trio.CancelScope(deadline=trio.current_time() + seconds, shield=True):
                await self._in_progress.ended.wait()

    def _sign(self, head: HeadInProgress) -> SignedVersion | None:
        record, store = provenance_record_of(head.batches), self._publisher.store
        with store.turn():
            if store.follower.term != head.term:
                return None
            return self._publisher.sign(
                head.state,
                step=head.step,
                roster=head.roster,
                groups=[group.id for batch in head.batches for group in batch.groups],
                ext={} if record is None else provenance_ext(store.blobs.put(record)),
            )

    def _activate(self, head: HeadInProgress) -> None:
        if head.signed is None:
            raise DefectError("a version became active before it was signed")
        self._publisher.activate(head.signed)
        versions = self._run.manifest.sync.staleness + 2
        self._publisher.store.prune(versions=versions, settled=head.signed.head.id)
