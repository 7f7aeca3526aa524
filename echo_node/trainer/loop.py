"""The trainer's loop: batch source -> scoring -> journal -> step -> publish.

    BatchSource       batch_source.py     a batch: requested (sequential), gossiped, or from a log
      SequentialSource, VerdictGate       requests to samplers; groups that need verdicts
      GossipSource, ReplayBuffer          gossip and deliveries, waiting to be drawn
      GroupAdmission  group_admission.py  checks of every group, and its verdicts
    BatchScorer       batch_scoring.py    rewards by the contract, own check of a share
    TrainingJournal   journal.py          the batch on disk, before anything is learnt from it
    learn             step.py             one optimiser step
    HeadPublisher     head_publisher.py   the next version of the weights, signed and announced
    CheckpointSchedule, TrainerStatus     checkpoints, the record of each step, numbers for people

Beside the steps run VerdictListener (verdicts in), Receipts (answers to samplers out) and
InventoryPublisher (what was taken, for verifiers to see). Whatever
ends the trainer, `recovery.py` restores its state in the next process.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.errors import ContractError
from echo_node.net.base import Network
from echo_node.net.outbox.direct_delivery import Taker, serve_deliveries
from echo_node.net.rate_limit import UploadLimit
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.rollouts.group_refs import GroupRefFetcher
from echo_node.runs.algorithm import training_settings
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.reputation import Reputations
from echo_node.telemetry.metrics import Records
from echo_node.trainer.batch_scoring import BatchScorer
from echo_node.trainer.batch_source import BatchRequest, BatchSource, SwarmSource
from echo_node.trainer.checkpoint_schedule import CheckpointSchedule
from echo_node.trainer.gossip_source import GossipSource
from echo_node.trainer.group_admission import GroupAdmission
from echo_node.trainer.head_publisher import HeadPublisher
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.journal import Batch, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.recovery import (
    CHECKPOINT_EVERY,
    RecoveredState,
    accounted_since,
    restore_groups,
    restore_heads,
    resume,
)
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.sender_quota import SenderQuota
from echo_node.trainer.sequential_source import SequentialSource
from echo_node.trainer.status import TrainerStatus
from echo_node.trainer.step import TrainStep, learn
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.verdict_listener import VerdictEnforcer, VerdictListener
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.trainer.work_split import WorkSplit
from echo_node.weights.publisher import Publisher
from echo_node.weights.seeding import WeightsSeeder
from protocol import Identity, Join, open_sealed, topics

log = logging.getLogger(__name__)
FRUITLESS: Final = 64
"""Batches in a row without a usable group before the contract counts as broken."""


class TrainerLoop:
    """The trainer that leads a run.

    `records` gets a record of each step; with `checkpoints`, a folder, training can be resumed;
    `source` replaces the swarm as the source of batches.
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
    ) -> None:
        batch, bound = training_settings(run.manifest).batch_groups, run.manifest.sync.staleness
        shares, drops = ClassShares(run.manifest.engines), Counter[str]()
        self._run, self._network = run, network
        self._step, self._publisher = step, publisher
        self._records, self._journal = records, journal
        self._checkpoints = checkpoints
        self._gate = gate or PauseGate()
        self._drops = drops
        """Groups that were refused or left out, by reason."""
        self._policy = policy or VerdictPolicy(run, identity)
        self._checks = Admission(run)
        self._seeder = WeightsSeeder(network, publisher.store, uplink=uplink, files=run.files())
        self._joins = RosterBuilder(run)
        self._schedule = CheckpointSchedule(checkpoints, checkpoint_every, step, publisher, journal, bound)
        self._buffer = ReplayBuffer(
            capacity=(bound + 1) * batch, staleness=bound, batch=batch, entry=self._policy, shares=shares
        )
        self._receipts = Receipts(network, identity, run.id)
        self._enforcer = VerdictEnforcer(self._buffer, self._receipts, journal)
        self._verdicts = VerdictListener(run, self._policy, self._enforcer, journal)
        self._inventory = InventoryPublisher(
            run, network, identity, self._policy, self._buffer, self._receipts
        )
        self.admission = GroupAdmission(self._checks, self._policy, self._enforcer, drops, self._inventory)
        validator = GossipValidator(run, self._checks)
        quota = SenderQuota(validator.named)
        self.reputation = Reputations(quota, self._policy)
        """The mute rules of the trainer: useless groups, and dishonest ones."""
        self._heads = HeadPublisher(
            run, network, step, publisher, self._seeder, self._joins, self._checks, self._receipts
        )
        self._gossip = GossipSource(
            run.id,
            batch,
            self._buffer,
            self._receipts,
            self.admission,
            journal,
            validator,
            quota,
            GroupRefFetcher(network, run.id, welcome=self.admission.accepts_from),
        )
        sequential = SequentialSource(
            network,
            identity,
            run.id,
            batch,
            self.admission,
            self._receipts,
            spread=spread,
            shares=shares,
            gate=VerdictGate(run, network, self._policy, self._receipts, drops, self._inventory),
            entry=self._policy,
        )
        self._swarm = SwarmSource(run, sequential, self._gossip, self._heads, self._joins, self._policy)
        self._source: BatchSource = source or self._swarm
        self._scorer = BatchScorer(run, self._policy, self._enforcer, self._receipts, journal, drops)
        self.tokens = self.admission.tokens
        """Tokens admitted per second."""
        self._status = TrainerStatus(
            step=step,
            publisher=publisher,
            records=records,
            buffer=self._buffer,
            gossip=self._gossip,
            joins=self._joins,
            policy=self._policy,
            reputation=self.reputation,
            drops=drops,
            tokens=self.tokens,
            gate=self._gate,
        )
        self.members = self._status.members
        self._number = 0
        """Number of the last batch that was learnt from."""
        self._learning = False
        """Whether a batch is between the journal and the records."""
        self._fruitless = 0
        """Batches in a row without a usable group."""
        self.recovered: RecoveredState | None = None
        """State of the trainer before this one, once it is known."""

    def status(self) -> dict[str, Any]:
        """Return the state of the trainer in plain numbers."""
        return self._status.status(
            batches=self._number, learning=self._learning, waits_for=self._swarm.waits_for
        )

    async def work(
        self, steps: int, *, first_samplers: int = 1, early: bool = False, linger: float = 0.0
    ) -> None:
        """Recover or wait for the first samplers; then work through `steps` batches.

        `steps` counts over the whole run. `early` publishes the first version before anybody has
        joined, for newcomers that have no weights yet; for `linger` seconds the last version can
        still be fetched.
        """
        recovered = self.recovered = await self._recover()
        self.admission.exempt_known_heads()
        deliveries = {
            topics.topic(self._run.id, topics.JOINS): self._joins.taker(self._journal, self._network.address),
            topics.topic(self._run.id, topics.GROUPS): Taker(self._gossip.validate, self._gossip.take),
        }
        with serve_deliveries(self._network, deliveries):
            async with self._seeder.serve(), trio.open_nursery() as nursery:
                nursery.start_soon(self._gossip.listen, self._network)
                nursery.start_soon(self._verdicts.listen, self._network)
                nursery.start_soon(self._receipts.send_periodically)
                nursery.start_soon(self._inventory.work)
                if recovered.tip is None:
                    if early:
                        await self._heads.publish()
                    await self._joins.wait_for(first_samplers)
                    await self._heads.publish()
                else:
                    await self._heads.announce(recovered.tip)
                try:
                    for batch in recovered.pending:
                        await self._train_on(batch)
                    while self._number < steps:
                        await self._take_step()
                except trio.Cancelled:
                    if self._heads.is_settled and not self._learning:
                        await self._schedule.save_final(self._number)
                    raise
                await self._heads.flush()
                await self._schedule.save(self._number)
                await self._receipts.send()
                await trio.sleep(linger)
                nursery.cancel_scope.cancel()

    # The pipeline

    async def _take_step(self) -> None:
        """Take one batch through the pipeline."""
        await self._gate.wait_open()
        start = time.monotonic()
        tip = self._heads.tip
        records = await self._source.next_batch(
            BatchRequest(self._number + 1, self._step.version, tip, self._heads.roster)
        )
        ready = time.monotonic()
        scored, left_out = await self._scorer.score(records)
        tip = self._heads.tip  # the source may have published fresh heads
        batch = Batch(self._number + 1, self._step.version, tip.message.version + 1, scored, tip.id)
        while batch.groups and (condemned := await self._journal.draw(batch, left_out)):
            left_out |= self._scorer.leave_out(condemned)
            batch = replace(batch, groups=tuple(each for each in batch.groups if each.id not in condemned))
        if not batch.groups:
            await self._skip(left_out)
            return
        if not self._run.is_async(tip.message.version):  # else they were accepted on arrival
            for group in batch.groups:
                self._receipts.accept(group.id)
        await self._train_on(batch, waited=ready - start, began=ready)

    async def _train_on(self, batch: Batch, *, waited: float = 0.0, began: float | None = None) -> None:
        """Learn from a batch that is in the journal; publish and save when due."""
        began = time.monotonic() if began is None else began
        self._learning = True
        figures = await trio.to_thread.run_sync(learn, self._step, batch)
        self._number, self._fruitless = batch.number, 0
        self._heads.add(batch)
        self._policy.used(group.id for group in batch.groups)
        for sampler in {group.sampler for group in batch.groups}:
            self._network.protect(sampler)
        head = await self._heads.publish() if self._heads.is_due else None
        seconds = time.monotonic() - began
        self._status.record_step(batch, figures, head, waited=waited, seconds=seconds)
        self._learning = False
        if head and self._schedule.is_due(self._number):
            await self._schedule.save(self._number)

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
            self._drops.update(last.dropped)
            self._policy.recall_used_condemned(last.condemned_used)
        for sealed in await self._journal.joins():
            self._joins.add(open_sealed(sealed, Join, self._run.id))
        if recovered.tip is None:
            return recovered
        bound = self._run.manifest.sync.staleness
        since = await accounted_since(self._journal, self._publisher.store.follower.heads, bound)
        known, roster = restore_heads(self._checks, self._publisher.store, recovered.tip, bound, since)
        self._heads.recover(roster)
        await restore_groups(
            self._journal,
            known,
            checks=self._checks,
            policy=self._policy,
            receipts=self._receipts,
            buffer=self._buffer,
            admission=self.admission,
        )
        await self._enforcer.flush()
        log.info(
            "recovered at version %d after batch %d: %d batches replayed, %d groups waiting",
            recovered.tip.message.version,
            recovered.number,
            recovered.replayed,
            len(self._buffer),
        )
        return recovered
