"""State of a trainer on disk: weights, journal, checkpoints, step records.

Without a folder all of it is temporary, and no checkpoint is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from echo_node.runs.run import Run, read_model
from echo_node.runtime.threads import run_abandonable
from echo_node.telemetry.evaluations import read_evaluations
from echo_node.telemetry.exporters import open_writer
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import StepDb, read_records
from echo_node.trainer.journal import TrainingJournal, open_journal
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Open state of a trainer."""

    folder: Path
    store: WeightsStore
    journal: TrainingJournal
    checkpoints: Path | None
    """Folder of checkpoints; None if the state is temporary."""


@asynccontextmanager
async def open_training_state(
    run: Run, folder: Path | None, records: Records, writers: Iterable[str] = ()
) -> AsyncGenerator[TrainingState]:
    """Open the state in a folder; the records are read from it, and written to it.

    `writers` are names of `echo_node.telemetry.exporters` that get the records as well.
    """
    layout = layout_of(read_model(run.folder))
    async with AsyncExitStack() as stack:
        if folder is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-trainer-")))
            store = stack.enter_context(WeightsStore.temporary(run.rules, layout))
            journal = await stack.enter_async_context(open_journal(None, run.id))
        else:
            place = folder
            await trio.to_thread.run_sync(write_metadata, place / "weights", run.sealed_manifest, layout)
            store = stack.enter_context(WeightsStore.open(place / "weights", run.rules, layout))
            journal = await stack.enter_async_context(open_journal(place / "journal.sqlite", run.id))
            records.recall(read_records(place / "records.sqlite"))
            records.evaluations += read_evaluations(place)
            stack.enter_context(records.writing_to(StepDb(place / "records.sqlite")))
        for name in writers:
            writer = await run_abandonable(partial(open_writer, name, run.id.hex()[:16], place))
            stack.enter_context(records.writing_to(writer))
        yield TrainingState(place, store, journal, place / "checkpoints" if folder else None)
