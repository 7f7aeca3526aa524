"""Speed and faults of the peers that this node downloads from, bounded.

A proven lie counts for longer than a stall, and neither for ever: a peer that lies again is caught
again.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import trio

PEERS: Final = 1_024
"""Peers remembered; the oldest goes first."""
WEIGHT: Final = 0.3
"""Weight of the newest measurement in a peer's average speed."""
PORTLESS_SECONDS: Final = 300.0
"""Seconds for which an unreachable bulk port is not tried again."""

Fault: TypeAlias = Literal[
    "wrong-blob",  # bytes that do not match their hash: proven
    "wrong-size",  # not the length that was requested, or that it reported
    "stalled",  # far slower than the others, or silent
    "gone",  # it disconnected
    "refused",  # it refused a read of what it reported to hold
]
OUT_SECONDS: Final[dict[Fault, float]] = {
    "wrong-blob": 3_600.0,
    "wrong-size": 600.0,
    "stalled": 60.0,
    "gone": 5.0,
    "refused": 30.0,
}
"""Seconds for which a fault ranks a peer last; a liar is not asked at all."""


@dataclass(eq=False, slots=True)
class SourceRecord:
    """Statistics of one peer as a source."""

    speed: float | None = None
    """Average bytes/s of one request."""
    received: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    behind_until: float = 0.0
    liar_until: float = 0.0
    portless_until: float = 0.0


class SourceStats:
    """Statistics of the peers that this node downloads from."""

    def __init__(self, luck: random.Random | None = None) -> None:
        self._records: dict[bytes, SourceRecord] = {}
        self._luck = luck or random.Random()  # noqa: S311 - spreads load, keeps no secret

    def of(self, peer: bytes) -> SourceRecord:
        """Return the record of a peer, new if there is none."""
        if peer not in self._records:
            if len(self._records) >= PEERS:
                del self._records[next(iter(self._records))]
            self._records[peer] = SourceRecord()
        return self._records[peer]

    def delivered(self, peer: bytes, count: int, seconds: float) -> None:
        """Record bytes received from a peer and the seconds they took."""
        record = self.of(peer)
        record.received += count
        speed = count / max(seconds, 1e-6)
        record.speed = speed if record.speed is None else WEIGHT * speed + (1 - WEIGHT) * record.speed

    def fault(self, peer: bytes, fault: Fault) -> None:
        """Record a fault of a peer."""
        record = self.of(peer)
        record.faults[fault] += 1
        until = trio.current_time() + OUT_SECONDS[fault]
        record.behind_until = max(record.behind_until, until)
        if fault == "wrong-blob":
            record.liar_until = until

    def faults(self) -> dict[bytes, dict[Fault, int]]:
        """Return faults by peer, for display and metrics."""
        return {peer: dict(record.faults) for peer, record in self._records.items() if record.faults}

    def speed(self, peers: Iterable[bytes]) -> float | None:
        """Return the median speed of some peers, or None if none is known."""
        known = [speed for peer in peers if (speed := self.of(peer).speed)]
        return statistics.median(known) if known else None

    def in_order(self, peers: Collection[bytes]) -> list[bytes]:
        """Return peers to ask: shuffled, recent faults last, proven liars left out."""
        now = trio.current_time()
        honest = [peer for peer in dict.fromkeys(peers) if self.of(peer).liar_until <= now]
        self._luck.shuffle(honest)
        return sorted(honest, key=lambda peer: self.of(peer).behind_until > now)

    def no_port(self, peer: bytes) -> None:
        """Record that a peer's bulk port cannot be used: read over streams for a while."""
        self.of(peer).portless_until = trio.current_time() + PORTLESS_SECONDS

    def may_have_port(self, peer: bytes) -> bool:
        return self.of(peer).portless_until <= trio.current_time()
