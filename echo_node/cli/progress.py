"""Progress bars: reading a model, and a run's first download.

A bar on a terminal, a line per second elsewhere, an event for programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

from echo_node.config import no_color
from echo_node.models.progress import Progress as ModelProgress
from echo_node.telemetry.events import Events
from echo_node.weights.progress import PullProgress

LINE_SECONDS: Final = 1.0
"""Seconds between two lines or events."""


@contextmanager
def shown(
    events: Events, console: Console, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[PullProgress | str], None]]:
    """Yield a callback for progress, which may be called at any rate."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    drawn = console.is_terminal and not events.as_json
    next_line = 0.0
    with Progress(*columns, console=console, transient=True, disable=not drawn) as bar:
        task, stage = bar.add_task("", total=None), ""

        def report(now: PullProgress | str) -> None:
            nonlocal next_line, stage
            as_event = True
            if drawn and isinstance(now, PullProgress):
                as_event = False
                if stage != (stage := f"version {now.version}: {now.what}"):
                    bar.reset(task, description=stage)
                bar.update(task, completed=now.done, total=now.total or None)
            if clock() < next_line:
                return
            next_line = clock() + LINE_SECONDS
            if as_event:
                events.emit("fetching", str(now), text=str(now))
            else:
                events.board.record("fetching", str(now), {"text": str(now)})  # the page has no bar

        yield report


@contextmanager
def model_bar() -> Generator[ModelProgress]:
    """Show on standard error, if that is a terminal, how far reading a model is."""
    with _bar("looking for the model", DownloadColumn()) as show:
        yield show


@contextmanager
def seconds_bar() -> Generator[ModelProgress]:
    """Show elapsed seconds out of a total on standard error, if it is a terminal."""
    with _bar("starting", MofNCompleteColumn(), TextColumn("seconds")) as show:
        yield show


@contextmanager
def _bar(first: str, *columns: ProgressColumn) -> Generator[ModelProgress]:
    console = Console(stderr=True, no_color=no_color())
    described = TextColumn("{task.description}", markup=False)
    with Progress(
        described, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(first, total=None)

        def show(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total or None)

        yield show
