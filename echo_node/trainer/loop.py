"""The trainer: batches in, versions out, in step with the samplers by either of Echo's protocols.

Every step is the same: get a batch, reward it, write it down, learn, publish. Where the batch comes from is the mode: asked
for (sequential pull) or gathered (asynchronous push-pull). Whatever ends it, it goes on where it was. It knows no sampler's
inside, and never imports one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from echo_node.admission import Admission, Admitted, Refused
from echo_node.errors import ContractError, DefectError
from echo_node.metrics import Rate, Records
from echo_node.net.base import Mute, Network
from echo_node.net.outbox.deliveries import Taker, serve_deliveries
from echo_node.net.throttle import Uplink
from echo_node.pausing import Gate
from echo_node.referring import Fetching
from echo_node.run import Run
from echo_node.sifting import Sieve
from echo_node.trainer.accounting import account_for
from echo_node.trainer.asking import NobodyAnswersError, SequentialSource
from echo_node.trainer.classes import ClassShares
from echo_node.trainer.gathering import USELESS, GossipSource
from echo_node.trainer.heeding import Heeding
from echo_node.trainer.journal import Batch, TrainingJournal
from echo_node.trainer.keeping import Keeping
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.recording import Circumstances, step_record
from echo_node.trainer.remembering import accounted_since, know_groups, know_heads
from echo_node.trainer.replay import ReplayBuffer
from echo_node.trainer.resuming import CHECKPOINT_EVERY, StandStill, learn, resume, state_of
from echo_node.trainer.roster import JoinDesk
from echo_node.trainer.settings import training_settings
from echo_node.trainer.spreading import Spread
from echo_node.trainer.step import StepFigures, TrainStep
from echo_node.trainer.verdicts import VerdictPolicy
from echo_node.trainer.vetting import Vetting
from echo_node.trainer.vouching import Vouching
from echo_node.weights.account import naming
from echo_node.weights.offering import Offering
from echo_node.weights.publish import Publication, Publisher
from protocol import (
    Envelope,
    Identity,
    Join,
    Opened,
    Roster,
    WeightsHead,
    open_sealed,
    peer_id,
    topics,
)

log = logging.getLogger(__name__)
NOBODY_SECONDS = 5.0
"""How long to wait for samplers that bring nothing, before a head with a fresh roster goes out."""
LONGEST_PATIENCE: Final = 300.0
MOST_MUTED: Final = 100
"""Samplers that are named when somebody asks who is muted."""
FRUITLESS: Final = 64
"""Batches in a row of which the contract can score nothing, before it is taken for broken."""


class Source(Protocol):
    """Where batches come from, if not from the swarm: a log, so that a run can be had again bit for bit."""

    async def next_batch(self, head: Opened[WeightsHead], number: int) -> tuple[Admitted, ...]:
        """The batch of this number, for the policy of this head."""


class TrainerLoop:
    """The trainer that leads a run. `records` gets a record of each step; with `checkpoints`, a folder, it can be resumed."""

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
        spread: Spread | None = None,
        source: Source | None = None,
        gate: Gate | None = None,
        uplink: Uplink | None = None,
    ) -> None:
        batch, bound = training_settings(run.told).batch_groups, run.told.sync.staleness
        self._run = run
        self._network = network
        self._step = step
        self._publisher = publisher
        self._records = records
        self._journal = journal
        self._checkpoints = checkpoints
        self._source = source
        self._gate = gate or Gate()
        self._policy = policy or VerdictPolicy(run, identity)
        self._admission = Admission(run)
        self._bound = bound
        self._offering = Offering(network, publisher.store, uplink=uplink, files=run.files())
        self._desk = JoinDesk(run)
        self._roster = Roster(())
        self._keeping = Keeping(checkpoints, checkpoint_every, step, publisher, journal, bound)
        self._announced: Opened[WeightsHead] | None = None
        """The newest head whose blobs can be had."""
        shares = ClassShares(run.told.engines)
        self._buffer = ReplayBuffer(
            capacity=(bound + 1) * batch, staleness=bound, batch=batch, entry=self._policy, shares=shares
        )
        self._receipts = Receipts(network, identity, run.id, lambda: self._announced)
        self._gossip = GossipSource(
            run.id,
            batch,
            self._buffer,
            self._receipts,
            self._judge_all,
            self._admission.release,
            journal,
            Sieve(run, self._admission),
            Fetching(network, run.id, welcome=self._takes_groups_of),
        )
        self._heeding = Heeding(
            run, self._policy, self._buffer, self._receipts, journal, self._heard_verdicts
        )
        self._sequential = SequentialSource(
            network,
            identity,
            run.id,
            batch,
            self.judge,
            spread=spread,
            refuse=self._receipts.refuse,
            shares=shares,
        )
        self._refused: Counter[str] = Counter()
        self._vouching = Vouching(run, network, self._policy, self._receipts, self._refused)
        self._vetting = Vetting(run, self._policy, self._heeding, self._receipts, journal, self._refused)
        self._carried: list[Batch] = []
        """What was learnt from since the last head, to which the next one commits."""
        self._number = 0
        """Of the last batch."""
        self._waits_for: str | None = None
        """What keeps a step from its batch, in words, once that has taken a while."""
        self._learning = False
        """Whether a batch is on its way from the journal to the records."""
        self._fruitless = 0
        self._bytes_in = 0
        self._active: deque[set[bytes]] = deque(maxlen=8)
        """Who has filled the last few batches: only they count when the pace is shared out."""
        self._learnt_from: Counter[bytes] = Counter()
        self._last_seen: dict[bytes, int] = {}
        self._began = time.monotonic()
        self.stood: StandStill | None = None
        """Where the trainer before this one stood, once that is known."""
        self.tokens = Rate()
        """Tokens admitted, by the second."""

    async def work(
        self, steps: int, *, first_samplers: int = 1, early: bool = False, linger: float = 0.0
    ) -> None:
        """Go on where it was, or wait for the first samplers; work until the run has had so many batches in all.

        `early` publishes the first version before anybody has joined, for newcomers that have nothing yet; for the seconds of
        `linger` the last one can still be had. Whatever helps on the way ends with it.
        """
        stood = self.stood = await self._come_back()
        with serve_deliveries(
            self._network,
            {
                topics.topic(self._run.id, topics.JOINS): self._desk.taker(self._journal),
                topics.topic(self._run.id, topics.GROUPS): Taker(self._gossip.look_at, self._gossip.take),
            },
        ):
            async with self._offering.serve(), trio.open_nursery() as nursery:
                nursery.start_soon(self._gossip.hear, self._network)
                nursery.start_soon(self._heeding.hear, self._network)
                nursery.start_soon(self._receipts.send_now_and_then)
                if stood.tip is None:
                    if early:
                        await self._publish()
                    await self._desk.wait_for(first_samplers)
                    await self._publish()
                else:
                    await self._announce(stood.tip)
                try:
                    for batch in stood.pending:
                        await self._train_on(batch)
                    while self._number < steps:
                        await self._take_step()
                except trio.Cancelled:
                    if self._is_whole():
                        await self._keeping.keep_the_last(self._number)
                    raise
                if self._carried:
                    await self._publish()
                await self._keeping.keep(self._number)
                await self._receipts.send()
                await trio.sleep(linger)
                nursery.cancel_scope.cancel()

    def status(self) -> dict[str, Any]:
        """How it goes, in plain numbers."""
        tip = self._publisher.tip
        return {
            "version": tip.message.version if tip else None,
            "step": self._step.version,
            "batches": self._number,
            "learning": self._learning,
            "reward": round(self._records.reward(), 4),
            "samplers": len(self._desk.roster().members),
            "waiting": len(self._buffer),
            "waits_for": self._waits_for,
            "dropped": dict(sorted((self._buffer.dropped + self._refused).items())),
            "muted": {
                peer_id(key): reason
                for key, reason in sorted(
                    (dict.fromkeys(self.unheard(), USELESS) | self._policy.muted()).items()
                )[:MOST_MUTED]
            },
            "tokens_per_second": round(self.tokens.per_second(), 1),
            "paused": list(self._gate.reasons),
        }

    def unheard(self) -> Mapping[bytes, Mute]:
        """Whose groups are not looked at for now, for how long, and why."""
        return self._gossip.unheard()

    def members(self) -> dict[bytes, dict[str, Any]]:
        """The samplers that have joined: the engine of each, how many of its groups were learnt from, and at which step
        the policy was that made the last of them.
        """
        return {
            member.key: {
                "engine": member.engine,
                "groups": self._learnt_from[member.key],
                "step": self._last_seen.get(member.key),
            }
            for member in self._desk.roster().members
        }

    # Coming back

    async def _come_back(self) -> StandStill:
        """Take up the weights, the batches and the groups of whoever worked in this folder before."""
        recorded = {record.number for record in self._records.steps}
        store = self._publisher.store

        def learnt(batch: Batch, figures: StepFigures) -> None:
            if batch.number not in recorded:
                head = next(
                    (each for each in store.follower.heads if each.message.version == batch.version), None
                )
                self._records.add(step_record(batch, figures, head.id if head else b"", Circumstances()))

        stood = await resume(self._step, self._publisher, self._journal, self._checkpoints, learnt=learnt)
        self._number = stood.pending[0].number - 1 if stood.pending else stood.number
        self._keeping.number = self._number - stood.replayed
        if self._records.steps:
            last = self._records.steps[-1]
            self._refused.update(last.dropped)
            self._policy.used_condemned = last.condemned_used
        for sealed in await self._journal.joins():
            self._desk.welcome(open_sealed(sealed, Join, self._run.id))
        if stood.tip is not None:
            since = await accounted_since(self._journal, store.follower.heads, self._bound)
            known, self._roster = know_heads(self._admission, store, stood.tip, self._bound, since)
            self._desk.take_over(self._roster)
            await know_groups(
                self._journal,
                known,
                admission=self._admission,
                policy=self._policy,
                receipts=self._receipts,
                buffer=self._buffer,
                judge=self.judge,
            )
            await self._heeding.flush()
            log.info(
                "going on after batch %d at version %d: %d batches were learnt again, %d groups wait",
                stood.number,
                stood.tip.message.version,
                stood.replayed,
                len(self._buffer),
            )
        return stood

    # Samplers

    def _takes_groups_of(self, sampler: bytes) -> bool:
        return self._admission.is_member(sampler) and not self._policy.is_muted(sampler)

    def judge(self, envelope: Envelope) -> Admitted | Refused:
        """Whether a group may be trained on: by its own checks, and by what verifiers have said."""
        return self._heed(self._admission.judge(envelope))

    async def _judge_all(self, envelopes: Sequence[Envelope]) -> list[Admitted | Refused]:
        return [self._heed(judged) for judged in await self._admission.judge_all(envelopes)]

    def _heed(self, judged: Admitted | Refused) -> Admitted | Refused:
        if isinstance(judged, Admitted):
            group = judged.group
            self._heeding.apply(self._policy.saw(group.id, group.signer))
            if self._policy.is_muted(group.signer):
                judged = Refused(
                    group.id, "muted", "its sampler is muted for what it sent before", signed=True
                )
            elif self._policy.is_condemned(group.id):
                judged = Refused(group.id, "condemned", "a verifier found it dishonest", signed=True)
        if isinstance(judged, Refused):
            self._refused[judged.reason] += 1
        else:
            self.tokens.add(judged.group.message.token_count)
        return judged

    def _heard_verdicts(self) -> None:
        self._gossip.wake()
        self._vouching.wake()

    # Steps

    @property
    def _tip(self) -> Opened[WeightsHead]:
        if (tip := self._publisher.tip) is None:
            raise DefectError("a step before anything was published")
        return tip

    async def _next_batch(self) -> tuple[Admitted, ...]:
        """A batch for the policy as it is. Where nobody brings anything, a head with a fresh roster goes out."""
        if self._source is not None:
            return await self._source.next_batch(self._tip, self._number + 1)
        patience = NOBODY_SECONDS
        while True:
            if self._run.is_async(self._tip.message.version):
                if drawn := await self._gossip.next_batch(self._step.version, patience=patience):
                    self._waits_for = None
                    return drawn
                self._wait_for(self._gossip.hindrance or f"no group has come for {patience:.0f} s")
            else:
                try:
                    drawn = await self._sequential.next_batch(self._tip, self._heard_roster())
                except NobodyAnswersError as error:
                    self._wait_for(str(error))
                    with trio.move_on_after(patience):
                        await self._desk.wait_for_news()
                else:
                    if vouched := await self._vouching.let_in(drawn):
                        self._waits_for = None
                        return vouched
                    self._wait_for("verifiers vouch for no group of this version")
            patience = min(2 * patience, LONGEST_PATIENCE)
            await self._publish()

    def _wait_for(self, what: str) -> None:
        self._waits_for = what
        log.warning("%s; samplers get a new head, and newcomers a chance", what)

    def _heard_roster(self) -> Roster:
        return Roster(tuple(each for each in self._roster.members if not self._policy.is_muted(each.key)))

    async def _take_step(self) -> None:
        await self._gate.wait_open()
        start = time.monotonic()
        drawn = await self._next_batch()
        ready = time.monotonic()
        scored, left_out = await self._vetting.vet(drawn)
        if not scored:
            await self._begin_again(left_out)
            return
        tip = self._tip
        batch = Batch(self._number + 1, self._step.version, tip.message.version + 1, scored, tip.id)
        while condemned := await self._journal.draw(batch, left_out):
            left_out |= self._vetting.leave_out(condemned)
            batch = replace(batch, groups=tuple(each for each in batch.groups if each.id not in condemned))
            if not batch.groups:
                await self._begin_again(left_out)
                return
        if not self._run.is_async(tip.message.version):  # else that was said when they came
            for group in batch.groups:
                self._receipts.accept(group.id)
        await self._train_on(batch, waited=ready - start, began=ready)

    async def _begin_again(self, left_out: dict[bytes, str]) -> None:
        """Nothing of a batch can be used: other slots, of another head, may do better."""
        await self._journal.drop(left_out)
        self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            raise ContractError(
                f"of the last {FRUITLESS} batches not one group could be used",
                advice="try the contract with echo-node contract test",
            )
        await self._publish()

    async def _train_on(self, batch: Batch, *, waited: float = 0.0, began: float | None = None) -> None:
        """Learn from a batch that is written down, publish when it is time, and tell what came of it."""
        began = time.monotonic() if began is None else began
        self._learning = True
        figures = await trio.to_thread.run_sync(learn, self._step, batch)
        self._number, self._fruitless = batch.number, 0
        self._carried.append(batch)
        self._policy.used(group.id for group in batch.groups)
        published = await self._publish() if self._is_head_due() else None
        done = time.monotonic()
        self._active.append({group.sampler for group in batch.groups})
        self._gossip.stepped(done - began, len(set.union(*self._active)))
        seen = Circumstances(
            dropped=dict(self._buffer.dropped + self._refused),
            waited_seconds=waited,
            step_seconds=done - began,
            at_seconds=done - self._began,
            condemned_used=self._policy.used_condemned,
            waiting=len(self._buffer),
            bytes_in=self._gossip.bytes_in - self._bytes_in
            or sum(len(each.sealed or b"") for each in batch.groups),
            bytes_out=sum(route.size for route in published.message.routes) if published else 0,
        )
        self._bytes_in = self._gossip.bytes_in
        record = step_record(batch, figures, published.id if published else b"", seen)
        self._learnt_from += record.by_sampler
        self._last_seen |= {group.sampler: group.step for group in record.groups}
        self._records.add(record)
        self._learning = False
        if published and self._keeping.is_due(self._number):
            await self._keeping.keep(self._number)

    def _is_whole(self) -> bool:
        """Whether all that was learnt is published and told, and nobody else leads: whoever goes on from here loses nothing."""
        ours = self._announced is not None and self._announced.id == self._tip.id
        return ours and not self._carried and not self._learning

    def _is_head_due(self) -> bool:
        """After every step while samplers are asked, since a batch is of its own version; else as the manifest says, and
        before the newest head itself is too old to be sampled under.
        """
        told = self._tip.message
        too_old = self._step.version - told.step > self._bound
        is_async = self._run.is_async(told.version)
        return not is_async or too_old or len(self._carried) >= self._run.told.sync.head_every

    # What others see

    async def _publish(self) -> Opened[WeightsHead]:
        """Sign the next version and let everybody know. Its blobs can be had before its head is heard of."""
        self._roster = self._desk.roster()
        made = await trio.to_thread.run_sync(self._make, tuple(self._carried), self._roster)
        self._carried.clear()
        self._admission.published(made.head, self._roster)
        await self._announce(made.head)
        return made.head

    async def _announce(self, head: Opened[WeightsHead]) -> None:
        for route in head.message.routes:
            self._offering.announce_held(route.table)
        self._announced = head
        await self._network.publish(topics.topic(self._run.id, topics.HEADS), head.sealed)

    def _make(self, trained: Sequence[Batch], roster: Roster) -> Publication:
        account = account_for(trained)
        made = self._publisher.publish(
            state_of(self._step),
            step=self._step.version,
            roster=roster,
            groups=[group.id for batch in trained for group in batch.groups],
            ext={} if account is None else naming(self._publisher.store.blobs.put(account)),
        )
        self._publisher.store.prune(versions=self._bound + 2, settled=made.head.id)
        return made
