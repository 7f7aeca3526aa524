"""What a trainer that stands by hears of verdicts: it writes them down as the leader does, with whose groups they are of.

Verifiers do not come back to whom they have muted, so a new leader that had not listened would believe a cheat for as long as
that lasts. Here nothing follows from a verdict: whoever leads reads the journal, and lets it count.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from echo_node.net.base import Message, Network, Validation
from echo_node.run import Run
from echo_node.trainer.heeding import look_at_verdicts
from echo_node.trainer.journal import Finding, TrainingJournal
from echo_node.trainer.verdicts import VerdictPolicy
from protocol import Identity, Verdict, read_batch, topics

NAMELESS: Final = 4_096
"""Verdicts that are kept until their groups are heard; gossip brings them in any order."""


class Witnessing:
    """One trainer's ear for verdicts while another leads."""

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
        """Which knows whose groups were heard, and reads what is said of them."""
        self._nameless: OrderedDict[tuple[bytes, bytes], Finding] = OrderedDict()
        """By group and verifier."""

    async def follow(self) -> None:
        """Hear until cancelled."""
        topic = topics.topic(self._run.id, topics.VERDICTS)
        async with self._network.subscribe(topic, self._look_at) as inbox:
            async for message in inbox:
                opened = [each.open(Verdict, self._run.id) for each in read_batch(message.data)]
                await self._keep([found for each in opened if (found := self._policy.read(each)) is not None])

    async def saw(self, groups: dict[bytes, bytes]) -> None:
        """Groups were heard, by their ids, of these samplers."""
        named = []
        for group, sampler in groups.items():
            self._policy.saw(group, sampler)
            told = [self._nameless.pop((group, verifier), None) for verifier in self._run.told.verifiers]
            named += [replace(found, sampler=sampler) for found in told if found is not None]
        if named:
            await self._journal.find(named)

    def _look_at(self, message: Message) -> Validation:
        return look_at_verdicts(self._run, message)

    async def _keep(self, findings: list[Finding]) -> None:
        named = [found for found in findings if found.sampler]
        for found in findings:
            if not found.sampler:
                self._nameless[found.group, found.verifier] = found
        while len(self._nameless) > NAMELESS:
            self._nameless.popitem(last=False)
        if named:
            await self._journal.find(named)
