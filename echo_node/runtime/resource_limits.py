"""Limits on memory, disk, bandwidth and device; their amounts as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.errors import ConfigError
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.threads import run_abandonable

DISK: Final = "disk"
"""Name of the reason to pause while the state is over --max-disk."""
DISK_SECONDS: Final = 30.0
"""Interval between two checks of the state folder's size."""
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS_OF_2: Final = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_AMOUNT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_LARGEST: Final = 10**15


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits in bytes and bytes per second; None is unlimited."""

    memory: int | None = None
    """Most memory of the engine process; beyond it that process is ended and restarted."""
    disk: int | None = None
    """Most size of the state folder, checked before anything of a run is fetched."""
    up: float | None = None
    down: float | None = None
    device: str = "auto"


def amount(text: str | None, flag: str) -> int | None:
    """Parse bytes from `2GB`, `500 MB`, `1.5Gi` or a plain number."""
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{flag} takes an amount, not {text!r}", advice="such as 500MB, 2GB or 1.5Gi")
    number, unit = found.groups()
    size = int(float(number) * (_UNITS | _UNITS_OF_2)[(unit or "").lower()])
    if not 0 < size <= _LARGEST:
        raise ConfigError(f"{flag}: {text} is out of range", advice="such as 500MB, 2GB or 1.5Gi")
    return size


EVERYTHING: Final = ResourceLimits()
"""No limits but the machine's own."""


async def watch_disk(gate: PauseGate, size: Callable[[], int], limits: ResourceLimits) -> None:
    """Close the gate while the state folder is larger than --max-disk.

    Runs until cancelled. `size` returns the folder's bytes, and runs in a thread.
    """
    while limits.disk is not None:
        taken = await run_abandonable(size)
        (gate.close if taken > limits.disk else gate.open)(DISK)
        await trio.sleep(DISK_SECONDS)
