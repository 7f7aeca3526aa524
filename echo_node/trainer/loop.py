"""The trainer's loop: batch source -> scoring -> journal -> step -> publish.

    BatchSource       batch_source.py     a batch: requested (sequential), gossiped, or from a log
      GroupIntake     group_intake.py     all that a group passes before it is part of a batch
        GroupAdmission                    checks of every group, and its verdicts
        GossipSource, ReplayBuffer        gossip and deliveries, waiting to be drawn
        SequentialSource, VerdictGate     requests to samplers; groups that need verdicts
    BatchGatherer     batch_gatherer.py   draws again for groups without advantage, if the run asks
      BatchScorer     batch_scoring.py    rewards by the contract, own check of a share
    TrainingJournal   journal.py          the batch on disk, before anything is learnt from it
    learn             step.py             one optimiser step
    HeadPublisher     head_publisher.py   the next version of the weights, signed and announced,
                                          while the next batch is gathered and its gradient computed
    CheckpointSchedule, TrainerStatus     checkpoints, the record of each step, numbers for people

Beside the steps run VerdictListener (verdicts in), Receipts (answers to samplers out),
InventoryPublisher (what was taken, for verifiers to see), and Evaluator (rewards on held-out
prompts, where the run asks for them). Whatever ends the trainer, `recovery.py` restores its state
in the next process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.errors import ContractError, DefectError
from echo_node.net.base import Network
from echo_node.net.outbox.direct_delivery import serve_deliveries
from echo_node.net.rate_limit import UploadLimit
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.telemetry.metrics import Records
from echo_node.trainer.batch_gatherer import BatchGatherer
from echo_node.trainer.batch_scoring import BatchScorer
from echo_node.trainer.batch_source import BatchRequest, BatchSource, SwarmSource
from echo_node.trainer.checkpoint_schedule import END_SECONDS, CheckpointSchedule
from echo_node.trainer.evaluator import Evaluator
from echo_node.trainer.group_intake import GroupIntake
from echo_node.trainer.head_publisher import HeadInProgress, HeadPublisher
from echo_node.trainer.journal import Batch, TrainingJournal
from echo_node.trainer.journal_totals import NO_ADVANTAGE
from echo_node.trainer.recovery import (
    CHECKPOINT_EVERY,
    RecoveredState,
    accounted_since,
    restore_heads,
    resume,
)
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.status import TrainerStatus
from echo_node.trainer.step import TrainStep, accumulate
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.trainer.work_split import WorkSplit
from echo_node.weights.publisher import Publisher
from echo_node.weights.seeding import WeightsSeeder
from protocol import Identity, Join, Opened, WeightsHead, open_sealed, topics

log = logging.getLogger(__name__)
FRUITLESS: Final = 64
"""Batches in a row without a usable group before the contract counts as broken."""


class TrainerLoop:
    """The trainer that leads a run.

    `records` gets a record of each step; with `checkpoints`, a folder, training can be resumed;
    `source` replaces the swarm as the source of batches; `evaluator` measures versions beside the
    steps.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        *,
        step: TrainStep,
        publisher: Publisher,
        records: Records,
        journal: TrainingJournal,
        policy: VerdictPolicy | None = None,
        checkpoints: Path | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        spread: WorkSplit | None = None,
        source: BatchSource | None = None,
        gate: PauseGate | None = None,
        uplink: UploadLimit | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self._run, self._network = run, network
        self._step, self._publisher = step, publisher
        self._records, self._journal = records, journal
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._gate = gate or PauseGate()
        self._policy = policy or VerdictPolicy(run, identity)
        bound = run.manifest.sync.staleness
        self._schedule = CheckpointSchedule(checkpoints, checkpoint_every, step, publisher, journal, bound)
        self._seeder = WeightsSeeder(network, publisher.store, uplink=uplink, files=run.files())
        self._joins = RosterBuilder(run)
        self.groups = GroupIntake(run, network, identity, self._policy, journal, spread)
        """Admission of groups, and the sources of batches."""
        checks, receipts = self.groups.checks, self.groups.receipts
        self._heads = HeadPublisher(
            run, network, step, publisher, self._seeder, self._joins, checks, receipts
        )
        self._swarm = SwarmSource(
            run, self.groups.sequential, self.groups.gossip, self._heads, self._joins, self._policy
        )
        self._scorer = BatchScorer(
            run, self._policy, self.groups.enforcer, receipts, journal, self.groups.drops
        )
        self._gatherer = BatchGatherer(source or self._swarm, self._scorer, training_settings(run.manifest))
        self._status = TrainerStatus(
            step=step,
            publisher=publisher,
            records=records,
            groups=self.groups,
            joins=self._joins,
            gate=self._gate,
        )
        self._publishing: trio.Nursery | None = None
        """Runs what publishes heads beside the steps."""
        self._number = 0
        """Number of the last batch that was learnt from."""
        self._learning = False
        """Whether a batch is between the journal and the weights."""
        self._fruitless = 0
        """Batches in a row without a usable group."""
        self.recovered: RecoveredState | None = None
        """State of the trainer before this one, once it is known."""

    def status(self) -> dict[str, Any]:
        """Return the state of the trainer in plain numbers."""
        status = self._status.status(
            batches=self._number, learning=self._learning, waits_for=self._swarm.waits_for
        )
        return status if self._evaluator is None else {**status, "evaluation": self._evaluator.status()}

    def members(self) -> dict[bytes, dict[str, Any]]:
        """Return the joined samplers with their engines and what they contributed."""
        return self._status.members()

    async def work(
        self, steps: int, *, first_samplers: int = 1, early: bool = False, linger: float = 0.0
    ) -> None:
        """Recover or wait for the first samplers; then work through `steps` batches.

        `steps` counts over the whole run. `early` publishes the first version before anybody has
        joined, for newcomers that have no weights yet; for `linger` seconds the last version can
        still be fetched.
        """
        recovered = self.recovered = await self._recover()
        self.groups.admission.exempt_known_heads()
        deliveries = {
            topics.topic(self._run.id, topics.JOINS): self._joins.taker(self._journal, self._network.address),
            topics.topic(self._run.id, topics.GROUPS): self.groups.taker(),
        }
        with serve_deliveries(self._network, deliveries):
            async with self._seeder.serve(), trio.open_nursery() as nursery:
                self._publishing = nursery
                nursery.start_soon(self.groups.listen)
                if self._evaluator is not None:
                    nursery.start_soon(self._evaluator.work)
                if recovered.tip is None:
                    if early:
                        await self._heads.publish()
                    await self._joins.wait_for(first_samplers)
                    await self._heads.publish()
                else:
                    await self._heads.announce(recovered.tip)
                if self._evaluator is not None:
                    self._evaluator.resume()
                try:
                    for batch in recovered.pending:
                        await self._train_on(batch)
                    while self._number < steps:
                        await self._take_step()
                except trio.Cancelled:
                    await self._heads.wait_ended(END_SECONDS)
                    if self._heads.is_settled:  # a gradient that was begun has changed no weights
                        await self._schedule.save_final(self._number)
                    raise
                await self._heads.flush()
                await self._heads.wait_read()
                await self._schedule.save(self._number)
                await self.groups.receipts.send()
                if self._evaluator is not None:
                    self._evaluator.offer(self._heads.tip)
                    await self._evaluator.finish()
                await trio.sleep(linger)
                nursery.cancel_scope.cancel()

    # The pipeline

    async def _take_step(self) -> None:
        """Take one batch through the pipeline."""
        await self._gate.wait_open()
        start = time.monotonic()
        if not self._run.is_async(self._heads.version):  # its slots can be requested
            await self._heads.wait_announced()
        start_wait = time.monotonic() - start
        gathered = await self._gatherer.gather(self._request)
        left_out, passed_over = gathered.left_out, gathered.passed_over
        waited = start_wait + gathered.waited_seconds
        newest = self._heads.version  # the source may have published fresh heads
        batch = Batch(
            self._number + 1,
            self._step.version,
            newest + 1,
            gathered.groups,
            self._heads.tip.id,
            len(passed_over),
            gathered.passed_reward,
        )
        while batch.groups and (condemned := await self._journal.draw(batch, left_out, passed_over)):
            left_out |= self._scorer.leave_out(condemned)
            batch = replace(batch, groups=tuple(each for each in batch.groups if each.id not in condemned))
        if not self._run.is_async(newest):  # else they were accepted on arrival
            for group in (*batch.groups, *passed_over):
                self.groups.receipts.accept(group.id)
        if passed_over:
            self.groups.drops[NO_ADVANTAGE] += len(passed_over)
        if not batch.groups:
            await self._skip(left_out | {group.id: NO_ADVANTAGE for group in passed_over})
            return
        await self._train_on(batch, waited=waited, began=start + waited)

    def _request(self) -> BatchRequest:
        return BatchRequest(self._number + 1, self._step.version, self._heads.tip, self._heads.roster)

    async def _train_on(self, batch: Batch, *, waited: float = 0.0, began: float | None = None) -> None:
        """Learn from a batch that is in the journal; publish and save when due.

        The head before is published meanwhile, and only the update of the weights waits for it.
        """
        began = time.monotonic() if began is None else began
        self._learning = True
        await trio.to_thread.run_sync(accumulate, self._step, batch)
        await self._heads.wait_read()
        figures = await trio.to_thread.run_sync(self._step.update)
        self._learning = False
        self._number, self._fruitless = batch.number, 0
        self._heads.add(batch)
        self._policy.used(group.id for group in batch.groups)
        for sampler in {group.sampler for group in batch.groups}:
            self._network.protect(sampler)
        record = partial(
            self._status.record_step, batch, figures, waited=waited, seconds=time.monotonic() - began
        )
        if not self._heads.is_due:
            record(None)
            return
        if self._publishing is None:
            raise DefectError("a step was taken outside of `work`")
        self._publishing.start_soon(self._publish, await self._heads.begin(), record)
        if self._schedule.is_due(self._number):
            await self._heads.wait_read()
            await self._schedule.save(self._number)

    async def _publish(self, head: HeadInProgress, record: Callable[[Opened[WeightsHead]], None]) -> None:
        """Publish a head beside the next step.

        A step is recorded before a checkpoint can cover it.
        """
        with head.under_way():
            signed = await self._heads.sign(head)
            record(signed)
            await self._heads.announce(signed)
            head.announced.set()
            await self._heads.activate(head)
            if self._evaluator is not None:
                self._evaluator.offer(signed)

    async def _skip(self, left_out: dict[bytes, str]) -> None:
        """Publish a fresh head, with other slots, where no group of a batch can be used."""
        await self._journal.drop(left_out)
        self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            raise ContractError(
                f"of the last {FRUITLESS} batches not one group could be used",
                advice="try the contract with echo-node contract test",
            )
        await self._heads.publish()

    # Recovery

    async def _recover(self) -> RecoveredState:
        """Restore the weights, batches and groups of the trainer before this one."""
        recovered = await resume(self._step, self._publisher, self._journal, self._checkpoints, self._records)
        self._number = recovered.pending[0].number - 1 if recovered.pending else recovered.number
        self._schedule.resume_at(self._number - recovered.replayed)
        if self._records.steps:
            last = self._records.steps[-1]
            self.groups.drops.update(last.dropped)
            self._policy.recall_used_condemned(last.condemned_used)
        for sealed in await self._journal.joins():
            self._joins.add(open_sealed(sealed, Join, self._run.id))
        if recovered.tip is None:
            return recovered
        bound = self._run.manifest.sync.staleness
        since = await accounted_since(self._journal, self._publisher.store.follower.heads, bound)
        known, roster = restore_heads(self.groups.checks, self._publisher.store, recovered.tip, bound, since)
        self._heads.recover(roster)
        await self.groups.restore(known)
        log.info(
            "recovered at version %d after batch %d: %d batches replayed, %d groups waiting",
            recovered.tip.message.version,
            recovered.number,
            recovered.replayed,
            len(self.groups.buffer),
        )
        return recovered
