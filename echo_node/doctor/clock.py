"""Check that the clock is plausible, without asking anybody.

It is compared with the program's release, the newest file of the state, and the monotonic clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from echo_node.control.offline_report import look_into
from echo_node.doctor.finding import Finding, lacking, point, well, wrong
from echo_node.errors import StoreError

RELEASED: Final = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""Earliest plausible Unix time: the program is not older."""
UNTIL: Final = datetime(2126, 1, 1, tzinfo=UTC).timestamp()
"""Latest plausible Unix time."""
SLACK_SECONDS: Final = 600.0
"""Seconds by which files may be from the future."""
_WATCH_SECONDS: Final = 0.2
"""Seconds for which the clock is observed."""
_LEAP_SECONDS: Final = 1.0
"""Seconds by which it may jump meanwhile."""
_FIX: Final = "set the clock, and keep it right: sudo timedatectl set-ntp true"


def look(state: Path) -> list[Finding]:
    now = time.time()
    shown = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if not RELEASED <= now <= UNTIL:
        return [wrong("clock", "date", f"{shown} cannot be right for this program", _FIX)]
    says = f"{shown} is plausible; no time server was asked"
    return [well("clock", "date", says), _against_the_state(state, now), _steadiness()]


def _against_the_state(state: Path, now: float) -> Finding:
    """Compare the clock with the newest file: a clock that was set back is behind it."""
    try:
        newest = look_into(state).last_seen
    except StoreError:
        newest = None
    ahead = 0.0 if newest is None else newest - now
    if ahead <= SLACK_SECONDS:
        says = "nothing in the state is from the future" if newest else "no state to compare with"
        return well("clock", "past", says)
    says = f"the state was last written {_span(ahead)} in the future: the clock was wrong then, or is now"
    return lacking("clock", "past", says, _FIX)


def _steadiness() -> Finding:
    """Check whether the clock jumps while it is observed."""
    before = time.time() - time.monotonic()
    time.sleep(_WATCH_SECONDS)
    leap = abs(time.time() - time.monotonic() - before)
    says = "it runs evenly" if leap < _LEAP_SECONDS else f"it jumped by {leap:.0f} s within a moment"
    fine = True if leap < _LEAP_SECONDS else None
    return point("clock", "pace", fine=fine, says=says, fix="let one program alone set the clock")


def _span(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} days" if seconds >= 43_200 else f"{seconds / 60:.0f} minutes"
