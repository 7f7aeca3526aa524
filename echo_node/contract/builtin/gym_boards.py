"""Free Sokoban's boards, which reasoning-gym 0.1.25 leaks.

Each board refers to itself through an array of objects that Python's garbage collector does not
traverse, so every prompt and every score would leak some 20 KB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_boards: list[Any] = []
_listening: list[bool] = []


@contextmanager
def boards_let_go() -> Iterator[None]:
    """Boards that are made in the block are emptied at its end."""
    if not _listening:
        _listen()
    try:
        yield
    finally:
        while _boards:
            _boards.pop().puzzle.fill(None)


def _listen() -> None:
    """Record every board as it is made; the library offers no other hook."""
    from reasoning_gym.games.contrib.sokoban.src.game import Game  # noqa: PLC0415 -- as the library itself

    usual = Game.__init__

    def made(board: Any, *args: Any, **kwargs: Any) -> None:
        usual(board, *args, **kwargs)
        _boards.append(board)

    Game.__init__ = made
    _listening.append(True)
