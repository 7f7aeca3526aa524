"""The verifier's loop: follow the chain, hear groups, draw lots, look, and say what was found, signed.

Groups that fail the cheap checks of `admission` are not its business: trainers refuse them by themselves. One group at a
time is looked at, in a thread. It knows no sampler's and no trainer's inside, and never imports one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from echo_node.admission import Admission, Admitted, Refused
from echo_node.engine.base import Engine, SlotRequest, generate_groups
from echo_node.errors import ContractError, EngineError, PeerError, StoreError, one_line
from echo_node.net.base import IGNORE, Message, Network, Validation
from echo_node.net.inbox import Inbox
from echo_node.pausing import Gate
from echo_node.run import Run
from echo_node.sifting import Sieve
from echo_node.threads import run_stoppable
from echo_node.trust import Trust
from echo_node.verifier.bands import Bands, Breach
from echo_node.verifier.choosing import Choosing
from echo_node.verifier.early import Early
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.holding import hold
from echo_node.verifier.holes import Holes
from echo_node.verifier.judging import Finding
from echo_node.verifier.suspicion import Suspicion
from echo_node.verifier.twice import Twice
from echo_node.weights.handing import Handing
from echo_node.weights.pull import Puller
from protocol import (
    Envelope,
    Identity,
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
"""Verdicts gather for so long, since the network carries few messages a second."""
UNSENT: Final = 4_096
NOT_YET: Final = frozenset({"stale", "not-in-roster"})
"""Refusals by which the head of a group, or its roster, may only not be here yet."""
AUDITS: Final = 256
"""Heads and samplers whose holes are remembered."""


class VerifierLoop:
    """One verifier of a run. `told` hears every verdict that it signs; `clock` is that of its trust; what it condemns is kept in
    `condemned`.
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
        told: Callable[[Admitted, Opened[Verdict]], None] | None = None,
        clock: Callable[[], float] = time.time,
        gate: Gate | None = None,
        condemned: Path | None = None,
    ) -> None:
        self._run = run
        self._network = network
        self._identity = identity
        self._puller = puller
        self._told = told
        self._clock = clock
        self._gate = gate or Gate()
        self._admission = Admission(run)
        self._sieve = Sieve(run, self._admission)
        self._handing = Handing(puller.store, engine)
        self._judge = Twice(run, self._handing, condemned)
        self._bands = {tolerance.engine: Bands(tolerance) for tolerance in run.told.engines}
        self._suspicion = Suspicion()
        self._holes = Holes()
        self._worth: OrderedDict[tuple[bytes, bytes], dict[int, float]] = OrderedDict()
        """Of slots that were left out, by head and sampler."""
        self._published: set[bytes] = set()
        """Heads whose groups can be looked at."""
        self._missed: set[bytes] = set()
        """Heads that groups may be drawn under, and whose weights cannot be built here."""
        self._early = Early(clock)
        self._unsent: list[bytes] = []
        self._chosen = trio.Event()
        self.trust = trust or Trust()
        quorum = run.told.verification.policy == "quorum"
        self.choosing = Choosing(run.id, identity, self.trust, every=quorum)
        self.results: Counter[str] = Counter()
        """How many groups were found what."""

    async def work(self) -> None:
        """Verify until cancelled."""
        topic = topics.topic(self._run.id, topics.GROUPS)
        async with (
            self._puller.work(),
            self._network.subscribe(topic, self._look_at) as groups,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._follow)
            nursery.start_soon(self._hear, groups)
            nursery.start_soon(self._verify)
            nursery.start_soon(self._send)

    # The chain

    async def _follow(self) -> None:
        """Hold the newest weights, and know under which heads groups may be drawn."""
        await self._puller.hearing.ask_around()
        head: Opened[WeightsHead] | None = None
        while True:
            head = await self._puller.hearing.wait_for_newer(head.id if head else None)
            newest = self._newest()
            try:
                here = await hold(self._puller, newest)
                for each in here:
                    if each.id not in self._published:
                        self._admission.published(each, await self._puller.roster(each))
            except (PeerError, ProtocolError, StoreError) as error:
                log.warning("version %d is not here yet: %s", head.message.version, error)
                continue
            self._published = {each.id for each in here}
            self._missed = {each.id for each in newest} - self._published
            await self._judge_groups(self._early.take(self._published))

    def _newest(self) -> Sequence[Opened[WeightsHead]]:
        """The heads under which groups may be drawn now."""
        return self._puller.store.follower.heads[-(self._run.told.sync.staleness + 1) :]

    # Groups

    def _look_at(self, message: Message) -> Validation:
        said, envelopes = self._sieve.sift(message)
        if said is IGNORE and message.sender in self._sieve.named:
            self._keep_early(envelopes)  # of newcomers, whom a trainer knows by a roster that is not here yet
        return said

    async def _hear(self, groups: Inbox[Message]) -> None:
        async for message in groups:
            unknown = await self._judge_groups(read_batch(message.data))
            from_named = message.sender in self._sieve.named
            self._keep_early(each for each in unknown if from_named or self._admission.is_member(each.signer))

    async def _judge_groups(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Offer groups for a look; returns those that may only have come too early."""
        judged = await self._admission.judge_all(envelopes)
        for each in judged:
            if isinstance(each, Admitted) and each.group.message.engine in self._bands:
                self._take(each)  # a trainer may let in whom the manifest does not know
        unknown = {each.id for each in judged if isinstance(each, Refused) and each.reason in NOT_YET}
        return [each for each in envelopes if each.id in unknown]

    def _keep_early(self, envelopes: Iterable[Envelope]) -> None:
        """Keep groups under heads that may come, or that are known and whose weights are on their way."""
        awaited = {head.id for head in self._newest()} - self._published - self._missed
        for envelope in envelopes:
            try:
                heads = envelope.claim(TrajectoryGroup, self._run.id).heads
            except ProtocolError:
                continue
            missing = [head for head in heads if head not in self._published]
            if missing and all(
                head in awaited or self._puller.hearing.find(head) is None for head in missing
            ):
                self._early.keep(envelope, heads)

    def _take(self, admitted: Admitted) -> None:
        group = admitted.group.message
        self._holes.saw(group.heads[0], admitted.group.signer, group.slot, float(np.mean(group.rewards)))
        if self.choosing.offer(admitted, self._clock()):
            self._chosen.set()

    async def _verify(self) -> None:
        while True:
            await self._gate.wait_open()
            chosen = self.choosing.next()
            if chosen is None:
                self._chosen = trio.Event()
                await self._chosen.wait()
                continue
            admitted, lot = chosen
            try:
                finding = await run_stoppable(partial(self._find, admitted))
            except (ContractError, EngineError, StoreError) as error:
                if {head.id for head in self._newest()}.issuperset(admitted.group.message.heads):
                    log.warning("a group could not be looked at: %s", error)
                    self.results["not looked at"] += 1
                else:  # its weights were let go of before its turn came
                    self.choosing.passed_over += 1
                continue
            if finding is not None:
                self._say(admitted, lot, finding)

    def _find(self, admitted: Admitted, stop: Callable[[], bool]) -> Finding | None:
        """What one group says, by itself, with those before it, and with what was left out between them."""
        finding = self._judge.judge(admitted, stop)
        if finding is None or finding.breach is not None:
            return finding
        group, sampler = admitted.group.message, admitted.group.signer
        breach = self._suspicion.add(sampler, group.engine, finding.evidence, self._bands[group.engine])
        breach = breach or self._audit(admitted, stop)
        finding = Finding(breach, finding.evidence, finding.reward)
        if breach is not None:
            self._judge.keep(admitted, finding)
        return finding

    def _audit(self, admitted: Admitted, stop: Callable[[], bool]) -> Breach | None:
        """Make slots that the sampler left out under this head, and see what they are worth."""
        head, sampler = admitted.group.message.heads[0], admitted.group.signer
        slots = self._holes.suspicious(head, sampler)
        if not slots:
            return None
        worth = self._worth.setdefault((head, sampler), {})  # draws are fixed: to make them once is enough
        if len(self._worth) > AUDITS:
            self._worth.popitem(last=False)
        if new := [slot for slot in slots if slot not in worth]:
            worth |= self._worth_of(head, sampler, new, stop)
        what = self._holes.worth_less(head, sampler, [worth[slot] for slot in slots if slot in worth])
        return None if what is None else Breach("skipped-slots", what)

    def _worth_of(
        self, head: bytes, sampler: bytes, slots: Sequence[int], stop: Callable[[], bool]
    ) -> dict[int, float]:
        """The mean reward of slots of a sampler, as far as they can be scored here."""
        keys = [self._run.slot_key(head, sampler, slot) for slot in slots]
        prompts = self._run.prompts(keys)
        size = self._run.told.sampling.group_size
        requests = [
            SlotRequest(ids, key, size, self._run.limits) for key, (_, ids) in zip(keys, prompts, strict=True)
        ]
        rewards = {}
        for slot, (prompt, _), draws in zip(
            slots, prompts, generate_groups(self._handing.at(head), requests, stop=stop), strict=True
        ):
            try:
                scores = self._run.scores(prompt, [draw.ids for draw in draws])
            except ContractError:
                continue
            rewards[slot] = float(np.mean([score.value for score in scores]))
        return rewards

    # Verdicts

    def _say(self, admitted: Admitted, lot: bytes, finding: Finding) -> None:
        sampler, now, breach = admitted.group.signer, self._clock(), finding.breach
        if breach is None:
            self.trust.honest(sampler, now)
        elif breach.sure:
            self.trust.condemned(sampler, breach.reason, now)
            self._suspicion.forget(sampler)
            self.choosing.forget(sampler)
            log.info("a group is dishonest (%s): %s", breach.reason, breach.what)
        self.results["honest" if breach is None else breach.reason] += 1
        verdict = Verdict(
            draw=lot,
            figures=_figures(finding.evidence, finding.reward),
            group=admitted.group.id,
            note="" if breach is None else one_line(breach.what)[: limits.TEXT_BYTES // 4],
            reason="honest" if breach is None else breach.reason,
            result="honest" if breach is None else "dishonest" if breach.sure else "undecided",
        )
        sealed = seal(verdict, self._identity, self._run.id)
        self._unsent = [*self._unsent, sealed][-UNSENT:]
        if self._told is not None:
            self._told(admitted, open_sealed(sealed, Verdict, self._run.id))

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
