"""When a trainer writes down where training stands: every so many batches, and when it is told to end.

A checkpoint is of a moment right after a head, so that whoever goes on from it has the bits that everybody samples from. What
one holds, and how to go on from it, `resuming` knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import DefectError
from echo_node.threads import run_abandonable
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.resuming import keep_checkpoint
from echo_node.trainer.step import TrainStep
from echo_node.weights.publish import Publisher

END_SECONDS: Final = 20.0
"""For the last checkpoint of a trainer that is told to end."""


class Keeping:
    """The checkpoints of one trainer, in a folder; without one, only the journal lets go of what is past. `bound` is the
    run's on staleness.
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
        self.number = 0
        """Of the last batch that is covered."""

    def is_due(self, number: int) -> bool:
        return self._folder is None or number - self.number >= self._every

    async def keep(
        self,
        number: int,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]] = trio.to_thread.run_sync,
    ) -> None:
        """Write down where training stands, and let go of what led there. Right after a head."""
        if (tip := self._publisher.tip) is None:
            raise DefectError("a checkpoint before anything was published")
        if self._folder is not None:
            await in_thread(partial(keep_checkpoint, self._folder, self._step, number, tip.message.version))
        self.number = number
        await self._journal.settle(number, step=tip.message.step - self._bound)

    async def keep_the_last(self, number: int) -> None:
        """Of a trainer that is cancelled right after this batch, so that nothing has to be learnt again."""
        if self._folder is not None and number > self.number:
            with trio.CancelScope(deadline=trio.current_time() + END_SECONDS, shield=True):
                await self.keep(number, run_abandonable)
