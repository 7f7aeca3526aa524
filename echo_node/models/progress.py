"""How far the finding of a model is. Counts; shows nothing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Is told what is being done, and how many bytes of how many are done; 0 of 0: nobody can say."""


def no_progress(doing: str, done: int, total: int) -> None:
    """Nobody watches."""
