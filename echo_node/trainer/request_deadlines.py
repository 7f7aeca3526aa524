"""Deadlines of rollout requests, from measured speeds and the limits of the run.

Speeds are tokens per second of groups that were admitted; nothing that a sampler says of itself
counts. A request may take as long as its groups take at their longest at the measured speed, and no
longer than that at `SLOWEST`, whatever was measured: so a sampler that is slow on purpose gains
nothing. Beside that stands a ceiling relative to the other samplers of the same step.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from protocol import limits

START_SECONDS: Final = 60.0
"""Seconds of every request for weights to be fetched, loaded and patched first."""
SLACK: Final = 1.5
"""Factor of the longest expected time after which a request has failed."""
SLOWEST: Final = 2.0
"""Tokens per second below which no sampler is waited for."""
CEILING: Final = 3.0
"""Factor of the median time of the other samplers after which one is late."""
UNPROVEN_SECONDS: Final = 3_600.0
"""Seconds that a request to an unmeasured sampler may take at `SLOWEST`, unless for one group."""
SAMPLERS: Final = 8_192
"""Most samplers whose speed is remembered; those measured longest ago are forgotten first."""
_MEMORY: Final = 0.5
"""Weight of the previous speed in the moving average."""
_SHORTEST: Final = 1e-3
"""Seconds that count as the shortest measurable time."""


class RequestDeadlines:
    """Measured speeds of samplers; `group_tokens` are those of a group at its longest."""

    def __init__(self, group_tokens: int) -> None:
        self._most = group_tokens
        self._speeds: OrderedDict[bytes, float] = OrderedDict()
        self._mean_tokens: float | None = None
        """Tokens of a typical group, over all samplers."""

    def record(self, sampler: bytes, groups: int, tokens: int, seconds: float) -> None:
        """Record admitted groups, their tokens, and the seconds since they were asked for."""
        speed = tokens / max(seconds, _SHORTEST)
        self._speeds[sampler] = _blend(self._speeds.get(sampler), speed)
        self._speeds.move_to_end(sampler)
        if len(self._speeds) > SAMPLERS:
            self._speeds.popitem(last=False)
        self._mean_tokens = _blend(self._mean_tokens, tokens / groups)

    def is_measured(self, sampler: bytes) -> bool:
        return sampler in self._speeds

    def most_groups(self, sampler: bytes) -> int:
        """Return how many groups to ask a sampler for at once.

        An unmeasured one has to show its speed within a bounded time.
        """
        if self.is_measured(sampler):
            return limits.BATCH
        fits = int(UNPROVEN_SECONDS * SLOWEST / self._most)
        return min(max(1, fits), limits.BATCH)

    def seconds(self, sampler: bytes, groups: int) -> float:
        """Return the seconds after which a request for so many groups has failed."""
        slowest = min(self._speeds.values(), default=SLOWEST)
        speed = max(SLOWEST, self._speeds.get(sampler, slowest))
        return START_SECONDS + SLACK * groups * self._most / speed

    def expected(self, sampler: bytes, groups: int) -> float | None:
        """Return the seconds that a sampler needs for groups of typical length, if known."""
        if self._mean_tokens is None or sampler not in self._speeds:
            return None
        return groups * self._mean_tokens / max(self._speeds[sampler], _SHORTEST)


def ceiling(others: Iterable[float | None]) -> float:
    """Return the seconds after which a sampler is late, by those that the others took.

    None stands for one that is not done: only when half of the others are is there a median.
    """
    times = [math.inf if each is None else each for each in others]
    return CEILING * statistics.median_low(times) if times else math.inf


def _blend(known: float | None, new: float) -> float:
    return new if known is None else _MEMORY * known + (1 - _MEMORY) * new
