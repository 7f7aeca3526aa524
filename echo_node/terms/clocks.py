"""Two clocks that are far apart: a person hears of it, and nothing else depends on it.

Leases and staleness are counted on clocks that only count on. Logs, receipts of post and certificates of others do not, so
a clock that is a day off should be known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

APART_SECONDS: Final = 600.0
"""More than any heartbeat takes to arrive."""
_log = logging.getLogger("echo_node.terms.clocks")


class Clocks:
    """Holds this machine's clock against the leader's, and says once when they part. `apart` says so for as long as it lasts."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.apart: str | None = None

    def hear(self, leaders_ms: int) -> None:
        """Take the time that a heartbeat names."""
        ahead = self._clock() - leaders_ms / 1000
        apart = in_words(ahead) if abs(ahead) > APART_SECONDS else None
        if apart and not self.apart:
            _log.warning("%s", apart)
        self.apart = apart


def in_words(ahead: float) -> str:
    """By how much, and what to do."""
    hours = abs(ahead) / 3600
    span = (
        f"{hours / 24:.1f} days"
        if hours >= 48
        else f"{hours:.1f} hours"
        if hours >= 1
        else f"{hours * 60:.0f} minutes"
    )
    return (
        f"this machine's clock is {span} {'ahead of' if ahead > 0 else 'behind'} the leader's: one of the two is wrong; "
        "set yours with: sudo timedatectl set-ntp true"
    )
