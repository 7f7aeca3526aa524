"""What does not fit in memory is refused before a byte of it is asked for."""

from __future__ import annotations

from typing import Final

from echo_node.engine.machine import available_memory
from echo_node.errors import EngineError

SPARE: Final = 0.9
"""The part of what is free that one thing may take."""


class NoRoomError(EngineError):
    """This machine has too little memory for it."""


def check_fits(wanted: int, what: str, *, advice: str) -> None:
    """An error, if this machine has not so many bytes free."""
    free = available_memory()
    if free is not None and wanted > SPARE * free:
        raise NoRoomError(
            f"{what} would take {wanted / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free", advice=advice
        )
