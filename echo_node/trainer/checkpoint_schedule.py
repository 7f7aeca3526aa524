"""Checkpoint schedule: every so many batches, and when the trainer is stopped.

A checkpoint is taken right after a head was published, so that a trainer that resumes from it has
the weights that everybody samples from. `recovery` reads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import DefectError
from echo_node.runtime.threads import run_abandonable
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.recovery import keep_checkpoint
from echo_node.trainer.step import TrainStep
from echo_node.weights.publisher import Publisher

END_SECONDS: Final = 20.0
"""Deadline in seconds for the last checkpoint of a trainer that is stopped."""


class CheckpointSchedule:
    """The checkpoints of one trainer, in a folder.

    Without a folder, only the journal is pruned. `bound` is the run's bound on staleness.
    """

    def __init__(
        self,
        folder: Path | None,
        every: int,
        step: TrainStep,
        publisher: Publisher,
        journal: TrainingJournal,
        bound: int,
    ) -> None:
        self._folder = folder
        self._every = every
        self._step = step
        self._publisher = publisher
        self._journal = journal
        self._bound = bound
        self._number = 0
        """Number of the last batch that a checkpoint covers."""

    def is_due(self, number: int) -> bool:
        return self._folder is None or number - self._number >= self._every

    def resume_at(self, number: int) -> None:
        """Count from the batch that the newest checkpoint covers, after a restart."""
        self._number = number

    async def save(
        self,
        number: int,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]] = trio.to_thread.run_sync,
    ) -> None:
        """Write a checkpoint and prune the journal.

        Call it right after a head was published.
        """
        if (tip := self._publisher.tip) is None:
            raise DefectError("a checkpoint before anything was published")
        if self._folder is not None:
            await in_thread(partial(keep_checkpoint, self._folder, self._step, number, tip.message.version))
        self._number = number
        await self._journal.settle(number, step=tip.message.step - self._bound)

    async def save_final(self, number: int) -> None:
        """Save when the trainer is cancelled after this batch: no step is then repeated."""
        if self._folder is not None and number > self._number:
            with trio.CancelScope(deadline=trio.current_time() + END_SECONDS, shield=True):
                await self.save(number, run_abandonable)
