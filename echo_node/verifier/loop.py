"""Verifier loop: follow the chain, select and check groups, publish verdicts.

Groups that fail the cheap checks of `rollouts.admission` are dropped, since trainers refuse them
themselves. One group at a time is checked, in a thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from echo_node.engine.base import Engine
from echo_node.errors import ContractError, EngineError, PeerError, StoreError, one_line
from echo_node.net.base import IGNORE, Message, Network, Validation
from echo_node.net.subscription import Subscription
from echo_node.rollouts.admission import Admission, Refused
from echo_node.rollouts.announced_slots import is_announcement
from echo_node.rollouts.gossip_validation import (
    GossipValidator,
    validate_inventories,
    validate_verdicts,
)
from echo_node.rollouts.record import RolloutRecord
from echo_node.rollouts.taken_groups import HELD_BYTES_OF_OTHERS, TakenGroups, fetch_listed
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.reputation import CLASS_IN_DOUBT, Trust
from echo_node.runtime.threads import run_stoppable
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.inventories import InventoryLog
from echo_node.verifier.pending_groups import PendingGroups
from echo_node.verifier.recheck import Recheck
from echo_node.verifier.replay_check import Finding
from echo_node.verifier.selection import Selection
from echo_node.verifier.slot_auditor import AuditPlan, SlotAuditor
from echo_node.verifier.tolerance import CumulativeEvidence, Tolerance
from echo_node.verifier.version_window import pull_window
from echo_node.weights.engine_sync import EngineSync
from echo_node.weights.puller import Puller
from protocol import (
    Envelope,
    Identity,
    Inventory,
    Opened,
    ProtocolError,
    TrajectoryGroup,
    Verdict,
    WeightsHead,
    fill_batches,
    limits,
    open_sealed,
    read_batch,
    seal,
    topics,
)
from protocol.sampling import FARTHEST
from protocol.verdict import Figures

log = logging.getLogger(__name__)
SEND_SECONDS: Final = 0.25
"""Seconds over which verdicts are batched, since the network carries few messages a second."""
UNSENT: Final = 4_096
"""Signed verdicts that wait to be published; beyond that the oldest are dropped."""
NOT_YET: Final = frozenset({"stale", "not-in-roster"})
"""Refusals that may only mean that the head of a group, or its roster, is not here yet."""
GOSSIP_SECONDS: Final = 0.3
"""Seconds for which gossip may bring a listed group before it is fetched from the leader."""
INVENTORIES: Final = 8
"""Inventories that are worked on at once."""


class VerifierLoop:
    """One verifier of a run.

    `on_verdict` receives every verdict that it signs, `clock` drives its trust in samplers, and
    evidence files go to `evidence_folder`.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        engine: Engine,
        puller: Puller,
        *,
        trust: Trust | None = None,
        on_verdict: Callable[[RolloutRecord, Opened[Verdict]], None] | None = None,
        clock: Callable[[], float] = time.time,
        gate: PauseGate | None = None,
        evidence_folder: Path | None = None,
    ) -> None:
        self._run = run
        self._network = network
        self._identity = identity
        self._puller = puller
        self._on_verdict = on_verdict
        self._clock = clock
        self._gate = gate or PauseGate()
        self._admission = Admission(run)
        self._validator = GossipValidator(run, self._admission)
        self._engine_sync = EngineSync(puller.store, engine)
        self._recheck = Recheck(run, self._engine_sync, evidence_folder)
        self._tolerances = {tolerance.engine: Tolerance(tolerance) for tolerance in run.manifest.engines}
        self._cumulative = CumulativeEvidence()
        self._auditor = SlotAuditor(run, self._admission, self._engine_sync.at)
        self._published: set[bytes] = set()
        """Heads whose groups can be checked."""
        self._missed: set[bytes] = set()
        """Heads that groups may be drawn under, and whose weights cannot be built here."""
        self._pending = PendingGroups(clock)
        self._taken = TakenGroups(run, HELD_BYTES_OF_OTHERS)
        """Groups that other verifiers may ask for, should the leader not give them."""
        self._unsent: list[bytes] = []
        self._chosen = trio.Event()
        self._room = trio.Semaphore(INVENTORIES)
        self.trust = trust or Trust()
        self.inventories = InventoryLog(run.id, identity)
        quorum = run.manifest.verification.policy == "quorum"
        self.selection = Selection(run.id, identity, self.trust, every=quorum)
        self.results: Counter[str] = Counter()
        """Number of groups by result: "honest", "not looked at", or the reason of the breach."""

    async def work(self) -> None:
        """Verify until cancelled."""
        topic = topics.topic(self._run.id, topics.GROUPS)
        async with (
            self._puller.work(),
            self._network.subscribe(topic, self._look_at) as groups,
            self._network.subscribe(
                topics.topic(self._run.id, topics.INVENTORIES), partial(validate_inventories, self._run)
            ) as inventories,
            self._network.subscribe(
                topics.topic(self._run.id, topics.VERDICTS), partial(validate_verdicts, self._run)
            ) as verdicts,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._hear_verdicts, verdicts)
            nursery.start_soon(self._follow)
            nursery.start_soon(self._hear, groups)
            nursery.start_soon(self._hear_inventories, inventories)
            nursery.start_soon(self._verify)
            nursery.start_soon(self._send)
            with self._taken.serve(self._network):
                await trio.sleep_forever()

    # The chain

    async def _follow(self) -> None:
        """Pull new versions, and publish their rosters to the admission checks."""
        await self._puller.chain.ask_around()
        head: Opened[WeightsHead] | None = None
        while True:
            head = await self._puller.chain.wait_for_newer(head.id if head else None)
            newest = self._newest()
            try:
                here = await pull_window(self._puller, newest)
                for each in here:
                    if each.id not in self._published:
                        self._admission.published(each, await self._puller.roster(each))
            except (PeerError, ProtocolError, StoreError) as error:
                log.warning("version %d not pulled yet: %s", head.message.version, error)
                continue
            self._published = {each.id for each in here}
            self._auditor.settle()
            self._missed = {each.id for each in newest} - self._published
            await self._admit(self._pending.take(self._published))
            await self._acknowledge(self.inventories.acknowledge_again())

    def _newest(self) -> Sequence[Opened[WeightsHead]]:
        """Return the heads under which groups may be drawn now."""
        return self._puller.store.follower.heads[-(self._run.manifest.sync.staleness + 1) :]

    # Groups

    def _look_at(self, message: Message) -> Validation:
        validation, envelopes = self._validator.validate(message)
        if validation is IGNORE and message.sender in self._validator.named:
            self._keep_pending(envelopes)  # of newcomers, who are in a roster that is not here yet
        return validation

    async def _hear(self, groups: Subscription[Message]) -> None:
        async for message in groups:
            envelopes = self._validator.take(message.data)
            for envelope in filter(is_announcement, envelopes):
                self._auditor.announce(envelope)
            early = await self._admit([each for each in envelopes if not is_announcement(each)])
            from_named = message.sender in self._validator.named
            self._keep_pending(
                each for each in early if from_named or self._admission.accepts_from(each.signer)
            )

    async def _hear_inventories(self, inventories: Subscription[Message]) -> None:
        """Draw lots over what the leader took, by whatever door, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for message in inventories:
                envelope = Envelope.parse(message.data)
                if envelope.kind != Inventory.KIND:
                    continue
                inventory = envelope.open(Inventory, self._run.id)
                follower = self._puller.store.follower
                if inventory.signer != follower.leader or inventory.message.term < follower.term:
                    continue  # of a former leader, or of one that this node has yet to hear of
                if self.inventories.is_new(inventory):
                    await self._room.acquire()
                    nursery.start_soon(self._take_inventory, inventory)

    async def _hear_verdicts(self, verdicts: Subscription[Message]) -> None:
        """Look closer at samplers that other verifiers condemn, until cancelled."""
        async for message in verdicts:
            for envelope in read_batch(message.data):
                verdict = envelope.claim(Verdict, self._run.id)  # the validator has checked the signature
                if envelope.signer == self._identity.public or verdict.result != "dishonest":
                    continue
                if self.selection.accuse(verdict.group, envelope.signer, self._clock()):
                    self._chosen.set()

    async def _take_inventory(self, inventory: Opened[Inventory]) -> None:
        """Fetch the groups of an inventory that gossip did not bring, and acknowledge it."""
        log_ = self.inventories
        try:
            groups = tuple(inventory.message.ids())
            log_.counts["listed"] += len(groups)
            with trio.move_on_after(GOSSIP_SECONDS):  # gossip may be on its way
                while log_.missing(groups):
                    await log_.changed.wait()
            if missing := [group for group in log_.missing(groups) if group not in self._pending]:
                await self._fetch(inventory.signer, missing)
            await self._acknowledge([log_.acknowledge(inventory.id, groups)])
        finally:
            self._room.release()

    async def _fetch(self, leader: bytes, missing: Sequence[bytes]) -> None:
        """Fetch groups that the leader took from any holder; draw lots over them."""
        found = await fetch_listed(self._network, self._run, leader, missing)
        self.inventories.counts["fetched"] += len(found)
        if len(found) < len(missing):
            self.inventories.counts["not served"] += len(missing) - len(found)
            log.warning(
                "the leader lists %d groups that neither it nor others serve", len(missing) - len(found)
            )
        self._keep_pending(await self._admit(found, taken=True))

    async def _acknowledge(self, sealed: Iterable[bytes]) -> None:
        for each in sealed:
            await self._network.publish(topics.topic(self._run.id, topics.INVENTORIES), each)

    async def _admit(self, envelopes: Sequence[Envelope], *, taken: bool = False) -> list[Envelope]:
        """Offer admitted groups to the selection; return those that may be too early.

        `taken` says that the leader took them.
        """
        judged = await self._admission.judge_all(envelopes, taken=taken)
        for each in judged:
            if isinstance(each, RolloutRecord) and each.message.engine in self._tolerances:
                self._offer(each)  # a trainer may admit engine classes that the manifest does not name
                if each.sealed is not None:
                    self._taken.add(each.id, each.sealed)
        early = {each.id for each in judged if isinstance(each, Refused) and each.reason in NOT_YET}
        return [each for each in envelopes if each.id in early]

    def _keep_pending(self, envelopes: Iterable[Envelope]) -> None:
        """Keep groups under unknown heads, or known ones whose weights are being pulled."""
        awaited = {head.id for head in self._newest()} - self._published - self._missed
        for envelope in envelopes:
            try:
                heads = envelope.claim(TrajectoryGroup, self._run.id).heads
            except ProtocolError:
                continue
            missing = [head for head in heads if head not in self._published]
            if missing and all(head in awaited or self._puller.chain.find(head) is None for head in missing):
                self._pending.keep(envelope, heads)

    def _offer(self, admitted: RolloutRecord) -> None:
        self._auditor.came(admitted)
        if self.inventories.has_seen(admitted.id) or self.trust.is_muted(admitted.sampler, self._clock()):
            return  # nobody vouches for what a muted sampler sends
        drawn = self.selection.offer(admitted, self._clock())
        self.inventories.saw(admitted.id, drawn=drawn)
        if drawn:
            self._chosen.set()

    async def _verify(self) -> None:
        while True:
            await self._gate.wait_open()
            chosen = self.selection.next()
            if chosen is None:
                self._chosen = trio.Event()
                await self._chosen.wait()
                continue
            admitted, draw = chosen
            try:
                finding = await run_stoppable(partial(self._check, admitted, self._auditor.plan(admitted)))
            except (ContractError, EngineError, StoreError) as error:
                if {head.id for head in self._newest()}.issuperset(admitted.message.heads):
                    log.warning("group %s not checked: %s", admitted.id.hex()[:16], error)
                    self.results["not looked at"] += 1
                else:  # its weights were pruned before its turn came
                    self.selection.passed_over += 1
                continue
            if finding is not None:
                self._sign_verdict(admitted, draw, finding)

    def _check(self, admitted: RolloutRecord, plan: AuditPlan, stop: Callable[[], bool]) -> Finding | None:
        """Check a group alone, with its sampler's earlier groups, and for omissions."""
        finding = self._recheck.check(admitted, stop)
        if finding is None or finding.breach is not None:
            return finding
        group, sampler = admitted.message, admitted.sampler
        breach = self._cumulative.add(sampler, group.engine, finding.evidence, self._tolerances[group.engine])
        if breach is None and not self._tolerances[group.engine].wide:  # else engines differ too much
            breach = self._auditor.audit(admitted, finding.rewards, plan, stop)
        finding = Finding(breach, finding.evidence, finding.reward)
        if breach is not None:
            self._recheck.save(admitted, finding)
        return finding

    # Verdicts

    def _sign_verdict(self, admitted: RolloutRecord, draw: bytes, finding: Finding) -> None:
        sampler, now = admitted.sampler, self._clock()
        breach = self._recheck.review(admitted, finding.breach, now)
        if breach is None:
            self.trust.honest(sampler, now)
            self.selection.acquit(admitted)
            self._network.protect(sampler)
        elif breach.sure:
            self.trust.condemned(sampler, breach.reason, now)
            self._cumulative.forget(sampler)
            self._auditor.forget(sampler)
            self.selection.forget(sampler)
            log.info("group %s is dishonest (%s): %s", admitted.id.hex()[:16], breach.reason, breach.what)
        elif breach.reason == CLASS_IN_DOUBT:
            self.trust.doubted(sampler, now)
            self._cumulative.forget(sampler)
        self.results["honest" if breach is None else breach.reason] += 1
        verdict = Verdict(
            draw=draw,
            figures=_figures(finding.evidence, finding.reward),
            group=admitted.id,
            note="" if breach is None else one_line(breach.what)[: limits.TEXT_BYTES // 4],
            reason="honest" if breach is None else breach.reason,
            result="honest" if breach is None else "dishonest" if breach.sure else "undecided",
        )
        sealed = seal(verdict, self._identity, self._run.id)
        self._unsent = [*self._unsent, sealed][-UNSENT:]
        if self._on_verdict is not None:
            self._on_verdict(admitted, open_sealed(sealed, Verdict, self._run.id))

    async def _send(self) -> None:
        topic = topics.topic(self._run.id, topics.VERDICTS)
        while True:
            await trio.sleep(SEND_SECONDS)
            ready, self._unsent = self._unsent, []
            for batch in fill_batches(ready):
                await self._network.publish(topic, batch)


def _figures(found: Evidence, reward: float | None) -> Figures:
    return Figures(
        contrast=float(np.clip(found.contrast, -1.0, 1.0)),
        d_mean=min(found.d_mean, 1.0),
        d_most=min(found.d_most, 1.0),
        logprob_gap=min(found.gap_mean, 1e6),
        reward=reward,
        tokens=found.tokens,
        z_mean=min(found.z_mean, FARTHEST),
        z_most=min(found.z_most, FARTHEST),
    )
