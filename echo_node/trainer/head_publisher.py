"""Publish weights heads: sign the next version, seed its blobs, announce it.

A head commits to the batches that were learnt from since the one before, and carries the roster of
samplers that may sample under it.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from echo_node.errors import DefectError
from echo_node.net.base import Network
from echo_node.rollouts.admission import Admission
from echo_node.runs.run import Run
from echo_node.trainer.journal import Batch
from echo_node.trainer.provenance import provenance_record_of
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.step import TrainStep, state_of
from echo_node.weights.provenance_record import provenance_ext
from echo_node.weights.publisher import Publication, Publisher
from echo_node.weights.seeding import WeightsSeeder
from protocol import Opened, Roster, WeightsHead, topics


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
        self._announced: Opened[WeightsHead] | None = None
        """The newest head whose blobs can be fetched."""
        self.roster = Roster(())
        """Roster of the newest head."""

    @property
    def tip(self) -> Opened[WeightsHead]:
        """Return the newest head."""
        if (tip := self._publisher.tip) is None:
            raise DefectError("a step before anything was published")
        return tip

    @property
    def is_settled(self) -> bool:
        """Return whether all that was learnt is published, and this trainer has the tip."""
        ours = self._announced is not None and self._announced.id == self.tip.id
        return ours and not self._unpublished

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
        """Sign the next version and announce it.

        Its blobs are seeded before its head is announced.
        """
        self.roster = self._joins.roster()
        made = await trio.to_thread.run_sync(self._make, tuple(self._unpublished), self.roster)
        self._unpublished.clear()
        self._admission.published(made.head, self.roster)
        await self.announce(made.head)
        return made.head

    async def announce(self, head: Opened[WeightsHead]) -> None:
        """Seed the blobs of a head, name it in receipts from now on, and gossip it."""
        for route in head.message.routes:
            self._seeder.announce_held(route.table)
        self._announced = head
        self._receipts.set_head(head)
        await self._network.publish(topics.topic(self._run.id, topics.HEADS), head.sealed)

    def _make(self, trained: Sequence[Batch], roster: Roster) -> Publication:
        """Sign the next version, and prune old ones. Blocks: it runs in a thread."""
        record = provenance_record_of(trained)
        made = self._publisher.publish(
            state_of(self._step),
            step=self._step.version,
            roster=roster,
            groups=[group.id for batch in trained for group in batch.groups],
            ext={} if record is None else provenance_ext(self._publisher.store.blobs.put(record)),
        )
        self._publisher.store.prune(versions=self._run.manifest.sync.staleness + 2, settled=made.head.id)
        return made
