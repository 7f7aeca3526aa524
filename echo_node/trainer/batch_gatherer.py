"""Gather a scored batch: draw, score, and draw again for groups without advantage.

That is DAPO's dynamic sampling (arXiv 2503.14476). The trainer decides it by its own rewards, for
groups that were admitted and that verifiers drew lots over; samplers filter nothing. A group that
is passed over was accepted, and is credited like others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from echo_node.errors import DefectError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.algorithm import TrainingSettings
from echo_node.trainer.batch_scoring import BatchScorer
from echo_node.trainer.batch_source import BatchRequest, BatchSource
from echo_node.trainer.grpo import shaped_rewards


@dataclass(slots=True)
class GatheredBatch:
    """A batch with its rewards, and what was drawn besides."""

    groups: tuple[RolloutRecord, ...] = ()
    left_out: dict[bytes, str] = field(default_factory=dict)
    """Groups that cannot be used, and why."""
    passed_over: tuple[RolloutRecord, ...] = ()
    """Groups without advantage, in whose place others were drawn."""
    waited_seconds: float = 0.0

    @property
    def passed_reward(self) -> float:
        """Return the mean reward of what was passed over."""
        return statistics.fmean(
            [reward for group in self.passed_over for reward in group.rewards or ()] or [0.0]
        )


class BatchGatherer:
    """Gathers the batches of one trainer."""

    def __init__(self, source: BatchSource, scorer: BatchScorer, settings: TrainingSettings) -> None:
        self._source = source
        self._scorer = scorer
        self._settings = settings

    async def gather(self, request: Callable[[], BatchRequest]) -> GatheredBatch:
        """Return the next batch; `request` is asked anew for every draw.

        With dynamic sampling it is drawn for a bounded number of times. What has an advantage by
        then is the batch. If nothing has, the last groups are, and the step changes no weight.
        """
        gathered = await self._draw(request())
        size, draws = self._settings.batch_groups, self._settings.dynamic_sampling
        if not draws:
            return gathered
        self._pass_over(gathered)
        for _ in range(draws - 1):
            if (missing := size - len(gathered.groups)) <= 0:
                break
            more = await self._draw(replace(request(), count=missing))
            self._pass_over(more)
            gathered.groups += more.groups
            gathered.left_out |= more.left_out
            gathered.passed_over += more.passed_over
            gathered.waited_seconds += more.waited_seconds
        if not gathered.groups:
            gathered.groups = gathered.passed_over[-size:]
            gathered.passed_over = gathered.passed_over[:-size]
        return gathered

    async def _draw(self, request: BatchRequest) -> GatheredBatch:
        began = time.monotonic()
        records = await self._source.next_batch(request)
        waited = time.monotonic() - began
        scored, left_out = await self._scorer.score(records)
        return GatheredBatch(scored, left_out, waited_seconds=waited)

    def _pass_over(self, drawn: GatheredBatch) -> None:
        """Move the groups without advantage out of what was drawn."""
        drawn.passed_over = tuple(group for group in drawn.groups if not self._has_advantage(group))
        drawn.groups = tuple(group for group in drawn.groups if self._has_advantage(group))

    def _has_advantage(self, group: RolloutRecord) -> bool:
        if group.rewards is None:
            raise DefectError(f"group {group.id.hex()[:16]} was scored and has no rewards")
        shaped = shaped_rewards(group.rewards, group.message.lengths, self._settings.step.grpo)
        return min(shaped) != max(shaped)
