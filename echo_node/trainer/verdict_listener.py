"""Receive verdicts, and enforce them: drop condemned groups, mute samplers.

A finding is in the journal before it counts, so that a restart forgets nothing. The verdict policy
decides what a finding means.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from echo_node.net.base import Message, Network
from echo_node.rollouts.gossip_validation import validate_verdicts
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.trainer.journal import Finding, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_policy import Consequences, VerdictPolicy
from protocol import Identity, Verdict, read_batch, topics

NAMELESS: Final = 4_096
"""Most verdicts that a standby trainer keeps for groups that have not arrived.

Gossip brings verdicts and groups in any order.
"""


class VerdictEnforcer:
    """Removes condemned groups and those of muted samplers from the replay buffer."""

    def __init__(self, buffer: ReplayBuffer, receipts: Receipts, journal: TrainingJournal) -> None:
        self._buffer = buffer
        self._receipts = receipts
        self._journal = journal
        self._unwritten: dict[bytes, str] = {}
        """Groups that left the buffer, by reason; the findings are on disk already."""

    def apply(self, consequences: Consequences) -> list[RolloutRecord]:
        """Remove condemned groups and all that wait of muted samplers.

        Return the condemned groups.
        """
        condemned = self._buffer.remove(consequences.condemned, "condemned")
        self._withdraw(condemned, "condemned")
        if consequences.muted:
            removed = self._buffer.remove_where(lambda group: group.sampler in consequences.muted, "muted")
            self._withdraw(removed, "muted")
        return condemned

    def notify(self) -> None:
        """Wake whoever waits for a batch: other groups may be drawn than before."""
        self._buffer.changed.notify()

    async def flush(self) -> None:
        """Write to the journal what has left the buffer."""
        written, self._unwritten = self._unwritten, {}
        if written:
            await self._journal.drop(written)

    def _withdraw(self, groups: list[RolloutRecord], reason: str) -> None:
        for group in groups:
            self._receipts.withdraw(group.id, reason)
            self._unwritten[group.id] = reason


class VerdictListener:
    """Receives the verdicts of the run's verifiers for the trainer that leads."""

    def __init__(
        self, run: Run, policy: VerdictPolicy, enforcer: VerdictEnforcer, journal: TrainingJournal
    ) -> None:
        self._run = run
        self._policy = policy
        self._enforcer = enforcer
        self._journal = journal

    async def listen(self, network: Network) -> None:
        """Take in verdicts until cancelled."""
        topic = topics.topic(self._run.id, topics.VERDICTS)
        async with network.subscribe(topic, partial(validate_verdicts, self._run)) as inbox:
            async for message in inbox:
                findings = _findings(self._run, self._policy, message)
                if findings:
                    await self._journal.find(findings)
                    for found in findings:
                        self._policy.contest(self._enforcer.apply(self._policy.take(found)))
                    await self._enforcer.flush()
                    self._enforcer.notify()
                    self._policy.changed.notify()


class StandbyVerdictListener:
    """Receives verdicts for a trainer that stands by."""

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        journal: TrainingJournal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._network = network
        self._journal = journal
        self._policy = VerdictPolicy(run, identity, clock=clock)
        """Knows the samplers of groups, and reads verdicts on them."""
        self._nameless: OrderedDict[tuple[bytes, bytes], Finding] = OrderedDict()
        """Findings on groups of unknown samplers, by group and verifier."""

    async def follow(self) -> None:
        """Take in verdicts until cancelled."""
        topic = topics.topic(self._run.id, topics.VERDICTS)
        async with self._network.subscribe(topic, partial(validate_verdicts, self._run)) as inbox:
            async for message in inbox:
                await self._keep(_findings(self._run, self._policy, message))

    async def saw(self, groups: dict[bytes, bytes]) -> None:
        """Take note of groups that arrived: their samplers by group id."""
        named = []
        for group, sampler in groups.items():
            self._policy.saw(group, sampler)
            found = [self._nameless.pop((group, verifier), None) for verifier in self._run.manifest.verifiers]
            named += [replace(each, sampler=sampler) for each in found if each is not None]
        if named:
            await self._journal.find(named)

    async def _keep(self, findings: list[Finding]) -> None:
        named = [found for found in findings if found.sampler]
        for found in findings:
            if not found.sampler:
                self._nameless[found.group, found.verifier] = found
        while len(self._nameless) > NAMELESS:
            self._nameless.popitem(last=False)
        if named:
            await self._journal.find(named)


def _findings(run: Run, policy: VerdictPolicy, message: Message) -> list[Finding]:
    """Return the findings of a validated message that the policy accepts."""
    opened = [each.open(Verdict, run.id) for each in read_batch(message.data)]
    return [found for each in opened if (found := policy.read(each)) is not None]
