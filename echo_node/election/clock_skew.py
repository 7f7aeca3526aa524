"""Warn when this machine's clock and the leader's differ.

A heartbeat that is far from this clock does not count, since it may be a recording. So a node whose
clock is wrong does not hear its leader, and must be told why. Lengths of leases and staleness are
measured with monotonic clocks, and do not depend on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

APART_SECONDS: Final = 600.0
"""Seconds that no heartbeat's travel time explains: one that is further away does not count."""
_log = logging.getLogger("echo_node.election.clock_skew")


class ClockSkew:
    """Difference between this clock and the leader's, logged when it appears.

    `apart` is true for as long as it lasts.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.apart: str | None = None

    def hear(self, leaders_ms: int) -> None:
        """Compare with the time that a heartbeat names."""
        ahead = self._clock() - leaders_ms / 1000
        apart = in_words(ahead) if abs(ahead) > APART_SECONDS else None
        if apart and not self.apart:
            _log.warning("%s", apart)
        self.apart = apart


def in_words(ahead: float) -> str:
    """Return the difference and what to do, for messages."""
    hours = abs(ahead) / 3600
    span = (
        f"{hours / 24:.1f} days"
        if hours >= 48
        else f"{hours:.1f} hours"
        if hours >= 1
        else f"{hours * 60:.0f} minutes"
    )
    return (
        f"this machine's clock is {span} {'ahead of' if ahead > 0 else 'behind'} the leader's: one of the two is wrong, and "
        "its heartbeats do not count here; "
        "set yours with: sudo timedatectl set-ntp true"
    )
