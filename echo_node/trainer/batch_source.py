"""Batch sources: one protocol for sequential pull, gossip and replayed logs.

    SequentialSource   asks the samplers of a head's roster for its slots
    GossipSource       draws from the replay buffer that gossip and deliveries fill
    SwarmSource        picks one of the two by the run's mode, and publishes fresh heads
                       while neither has a batch

Tests and benchmarks implement the protocol with a recorded log, so that a run repeats bit for bit.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Final, Protocol

import trio

from echo_node.errors import PeerError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.runtime.reputation import PeerReputation
from echo_node.trainer.head_publisher import HeadPublisher
from echo_node.trainer.roster import RosterBuilder
from protocol import Opened, Roster, WeightsHead

log = logging.getLogger(__name__)
NOBODY_SECONDS = 5.0
"""Seconds without a batch before a fresh head is published; doubled each time."""
LONGEST_PATIENCE: Final = 300.0
"""Upper bound in seconds of that wait."""


class NoBatchError(PeerError):
    """No batch can be had for now; the message says what is missing."""


class NobodyAnswersError(NoBatchError):
    """No sampler of the roster that could fill the batch answers; a new one may join."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch that the trainer needs: for which step, under which head, from whom."""

    number: int
    """Number of the batch, counted from 1 over the whole run."""
    step: int
    """Optimiser step of the policy that will learn from the batch."""
    head: Opened[WeightsHead]
    roster: Roster
    """Samplers that may be asked under that head."""
    patience: float = math.inf
    """Seconds to wait before `NoBatchError`."""
    count: int | None = None
    """Groups that are missing; None: all of a batch."""


class BatchSource(Protocol):
    """A source of admitted, unscored batches."""

    async def next_batch(self, request: BatchRequest) -> tuple[RolloutRecord, ...]:
        """Return a batch, or raise `NoBatchError`."""


class SwarmSource:
    """Batches from the swarm by the run's mode; fresh heads while there is none."""

    def __init__(
        self,
        run: Run,
        sequential: BatchSource,
        gossip: BatchSource,
        heads: HeadPublisher,
        joins: RosterBuilder,
        reputation: PeerReputation,
    ) -> None:
        self._run = run
        self._sequential = sequential
        self._gossip = gossip
        self._heads = heads
        self._joins = joins
        self._reputation = reputation
        self.waits_for: str | None = None
        """Missing part of the next batch, as text."""

    async def next_batch(self, request: BatchRequest) -> tuple[RolloutRecord, ...]:
        """Return a batch, however long that takes."""
        patience = NOBODY_SECONDS
        while True:
            source = self._gossip if self._run.is_async(self._heads.version) else self._sequential
            try:
                batch = await source.next_batch(
                    replace(request, roster=self._without_muted(request.roster), patience=patience)
                )
            except NoBatchError as error:
                self.waits_for = str(error)
                log.warning("no batch, a fresh head is published: %s", error)
                if isinstance(error, NobodyAnswersError):
                    with trio.move_on_after(patience):
                        await self._joins.wait_for_join()
            else:
                self.waits_for = None
                return batch
            patience = min(2 * patience, LONGEST_PATIENCE)
            head = await self._heads.publish()
            request = replace(request, head=head, roster=self._heads.roster)

    def _without_muted(self, roster: Roster) -> Roster:
        return Roster(tuple(each for each in roster.members if not self._reputation.is_muted(each.key)))
