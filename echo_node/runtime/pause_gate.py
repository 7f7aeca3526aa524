"""Pause gate: closed while at least one named reason to pause exists.

Reasons are the user, the battery, the disk, leaving. Loops wait for the gate before they start
new work; work that has begun is finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol

import trio

from echo_node.errors import one_line

PERSON: Final = "person"
BATTERY: Final = "battery"
LEAVING: Final = "leaving"
MOST_REASONS: Final = 16
POWER: Final = Path("/sys/class/power_supply")
LOOK_SECONDS: Final = 10.0
"""Seconds between two checks of the power supply."""
_ADAPTERS: Final = {"Mains", "USB", "USB_C", "USB_PD", "Wireless"}


class EventCallback(Protocol):
    """Callback for pause and resume events."""

    def __call__(self, event: str, words: str, /, **more: Any) -> None: ...


def _ignore(_event: str, _words: str, /, **_more: Any) -> None:
    return


class PauseGate:
    """Open while no reason to pause exists. For the tasks of one trio loop."""

    def __init__(self, on_event: EventCallback = _ignore) -> None:
        self._on_event = on_event
        self._reasons: dict[str, None] = {}
        self._opened = trio.Event()

    @property
    def is_open(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons to pause, oldest first."""
        return tuple(self._reasons)

    def close(self, reason: str) -> None:
        """Add a reason to pause; a second time has no effect."""
        reason = one_line(reason)
        if reason in self._reasons or len(self._reasons) >= MOST_REASONS:
            return
        if self.is_open:
            self._opened = trio.Event()
        self._reasons[reason] = None
        words = f"paused ({', '.join(self._reasons)})"
        if reason == LEAVING:
            words = "leaving: starting nothing new; finished groups are delivered, or kept for the next start"
        self._on_event("paused", words, reasons=list(self._reasons))

    def open(self, reason: str) -> None:
        """Remove a reason to pause."""
        reason = one_line(reason)
        if reason not in self._reasons:
            return
        del self._reasons[reason]
        if self._reasons:
            words = f"still paused ({', '.join(self._reasons)})"
            self._on_event("paused", words, reasons=list(self._reasons))
        else:
            self._opened.set()
            self._on_event("resumed", "resumed", reasons=[])

    async def wait_open(self) -> None:
        """Wait until no reason is left, perhaps for days.

        The caller sets a deadline if it needs one.
        """
        while self._reasons:
            await self._opened.wait()
        await trio.lowlevel.checkpoint()


async def watch_battery(gate: PauseGate, *, folder: Path = POWER, every: float = LOOK_SECONDS) -> None:
    """Close the gate while this machine runs on battery, until cancelled."""
    while True:
        if await trio.to_thread.run_sync(is_on_battery, folder):
            gate.close(BATTERY)
        else:
            gate.open(BATTERY)
        await trio.sleep(every)


def is_on_battery(folder: Path = POWER) -> bool:
    """Return whether this machine runs on its battery, by Linux's sysfs.

    Batteries of devices, such as a mouse, do not count.
    """
    batteries, adapters = [], []
    for supply in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind = _read(supply / "type")
        if kind == "Battery" and _read(supply / "scope") != "Device":
            batteries.append(_read(supply / "status"))
        elif kind in _ADAPTERS:
            adapters.append(_read(supply / "online"))
    if not batteries or "1" in adapters:
        return False
    return "Discharging" in batteries or bool(adapters)


def _read(file: Path) -> str:
    """Read a sysfs file; empty if it is gone, since supplies come and go."""
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
