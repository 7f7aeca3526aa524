"""What this node has seen of its sources: how fast each was, and what it did wrong. Bounded, and in memory alone.

A proven lie counts for longer than a pause, and neither for ever: whoever lies again is caught again. It decides
nothing about a download; it says whom to ask first, and how long to wait.
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
WEIGHT: Final = 0.3
"""Of the newest measurement in a peer's speed."""
PORTLESS_SECONDS: Final = 300.0
"""How long a door that could not be reached is not tried again."""

Fault: TypeAlias = Literal[
    "wrong-blob",  # other bytes than their hash names: proven
    "wrong-size",  # another number of bytes than was asked for, or than it said
    "stalled",  # far slower than the others, or silent
    "gone",  # it went away
    "refused",  # it said no to what it said that it holds
]
OUT_SECONDS: Final[dict[Fault, float]] = {
    "wrong-blob": 3_600.0,
    "wrong-size": 600.0,
    "stalled": 60.0,
    "gone": 5.0,
    "refused": 30.0,
}
"""For how long a fault puts its peer behind all others; for a lie, outside."""


@dataclass(eq=False, slots=True)
class SourceRecord:
    """One peer, as a source."""

    speed: float | None = None
    """Bytes a second of one request, lately."""
    received: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    behind_until: float = 0.0
    liar_until: float = 0.0
    portless_until: float = 0.0


class Sources:
    """The peers that this node has downloaded from."""

    def __init__(self, luck: random.Random | None = None) -> None:
        self._records: dict[bytes, SourceRecord] = {}
        self._luck = luck or random.Random()  # noqa: S311 - spreads load, keeps no secret

    def of(self, peer: bytes) -> SourceRecord:
        """What is known of a peer; the longest known makes room for a new one."""
        if peer not in self._records:
            if len(self._records) >= PEERS:
                del self._records[next(iter(self._records))]
            self._records[peer] = SourceRecord()
        return self._records[peer]

    def delivered(self, peer: bytes, count: int, seconds: float) -> None:
        """It sent so many bytes in so long."""
        record = self.of(peer)
        record.received += count
        speed = count / max(seconds, 1e-6)
        record.speed = speed if record.speed is None else WEIGHT * speed + (1 - WEIGHT) * record.speed

    def fault(self, peer: bytes, fault: Fault) -> None:
        """Hold a fault against a peer."""
        record = self.of(peer)
        record.faults[fault] += 1
        until = trio.current_time() + OUT_SECONDS[fault]
        record.behind_until = max(record.behind_until, until)
        if fault == "wrong-blob":
            record.liar_until = until

    def faults(self) -> dict[bytes, dict[Fault, int]]:
        """Faults by peer, for people and metrics."""
        return {peer: dict(record.faults) for peer, record in self._records.items() if record.faults}

    def speed(self, peers: Iterable[bytes]) -> float | None:
        """The usual speed among peers, as far as it is known."""
        known = [speed for peer in peers if (speed := self.of(peer).speed)]
        return statistics.median(known) if known else None

    def in_order(self, peers: Collection[bytes]) -> list[bytes]:
        """Whom to ask, best first: shuffled, those with recent faults last, proven liars not at all."""
        now = trio.current_time()
        honest = [peer for peer in dict.fromkeys(peers) if self.of(peer).liar_until <= now]
        self._luck.shuffle(honest)
        return sorted(honest, key=lambda peer: self.of(peer).behind_until > now)

    def no_port(self, peer: bytes) -> None:
        """The peer's door cannot be reached: streams will do for a while."""
        self.of(peer).portless_until = trio.current_time() + PORTLESS_SECONDS

    def may_have_port(self, peer: bytes) -> bool:
        return self.of(peer).portless_until <= trio.current_time()
