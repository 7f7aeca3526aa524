"""How far the first fetch of a run's weights is: a bar for a person at a terminal, a line a second elsewhere, an event for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from echo_node.events import Events
from echo_node.weights.progress import Pulling

WORD_SECONDS: Final = 1.0
"""Between two lines, or two events."""


@contextmanager
def shown(
    events: Events, console: Console, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[Pulling | str], None]]:
    """Whom to tell how far it is, as often as one likes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    drawn = console.is_terminal and not events.as_json
    next_word = 0.0
    with Progress(*columns, console=console, transient=True, disable=not drawn) as bar:
        task, stage = bar.add_task("", total=None), ""

        def tell(now: Pulling | str) -> None:
            nonlocal next_word, stage
            aloud = True
            if drawn and isinstance(now, Pulling):
                aloud = False
                if stage != (stage := f"version {now.version}: {now.what}"):
                    bar.reset(task, description=stage)
                bar.update(task, completed=now.done, total=now.total or None)
            if clock() < next_word:
                return
            next_word = clock() + WORD_SECONDS
            if aloud:
                events.tell("fetching", str(now), text=str(now))
            else:
                events.board.hear("fetching", str(now), {"text": str(now)})  # the page has no bar

        yield tell
