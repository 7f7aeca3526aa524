"""When a node works and when it waits: a gate that anybody with a reason may close, and that is open once no reason is left.

Reasons have names: the person, the battery. The loops ask the gate before they begin something; what has begun is finished.
It knows nothing of what waits.
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
"""Between two looks at where the power comes from."""
_ADAPTERS: Final = {"Mains", "USB", "USB_C", "USB_PD", "Wireless"}


class Telling(Protocol):
    """Whoever hears that a node pauses, such as the events of the node."""

    def __call__(self, event: str, words: str, /, **more: Any) -> None: ...


def _nobody(_event: str, _words: str, /, **_more: Any) -> None:
    return


class Gate:
    """Open as long as nobody has a reason against it. For the tasks of one trio loop."""

    def __init__(self, tell: Telling = _nobody) -> None:
        self._tell = tell
        self._reasons: dict[str, None] = {}
        self._opened = trio.Event()

    @property
    def is_open(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is closed, the oldest reason first."""
        return tuple(self._reasons)

    def close(self, reason: str) -> None:
        """Let nothing begin any more. Twice for one reason is once."""
        reason = one_line(reason)
        if reason in self._reasons or len(self._reasons) >= MOST_REASONS:
            return
        if self.is_open:
            self._opened = trio.Event()
        self._reasons[reason] = None
        words = f"paused ({', '.join(self._reasons)})"
        if reason == LEAVING:
            words = "leaving: nothing new is begun; what is made is delivered, or kept for the next start"
        self._tell("paused", words, reasons=list(self._reasons))

    def open(self, reason: str) -> None:
        """Take a reason back. The others stand."""
        reason = one_line(reason)
        if reason not in self._reasons:
            return
        del self._reasons[reason]
        if self._reasons:
            words = f"still paused ({', '.join(self._reasons)})"
            self._tell("paused", words, reasons=list(self._reasons))
        else:
            self._opened.set()
            self._tell("resumed", "resumed", reasons=[])

    async def wait_open(self) -> None:
        """Until nobody has a reason against it: a person may take days. The caller sets a deadline where there is one."""
        while self._reasons:
            await self._opened.wait()
        await trio.lowlevel.checkpoint()


async def watch_battery(gate: Gate, *, folder: Path = POWER, every: float = LOOK_SECONDS) -> None:
    """Close the gate while this machine lives on its battery, until cancelled. Where there is none, it stays as it is."""
    while True:
        if await trio.to_thread.run_sync(is_on_battery, folder):
            gate.close(BATTERY)
        else:
            gate.open(BATTERY)
        await trio.sleep(every)


def is_on_battery(folder: Path = POWER) -> bool:
    """Whether the power comes from a battery of this machine, by what Linux says. A mouse's battery is none of it."""
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
    """Supplies come and go while one looks at them."""
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
