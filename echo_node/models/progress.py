"""Progress callback of model resolution: stage, bytes done, bytes in all."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the stage, the bytes done and the bytes in all; 0 of 0 where it is unknown."""


def no_progress(doing: str, done: int, total: int) -> None:
    """Ignore progress."""
