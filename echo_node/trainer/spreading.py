"""How a batch is shared out among samplers, and how long one of them is waited for before its share goes to others.

`Evenly` gives the same shares whatever happens, so that a run repeats bit for bit. `BySpeed` measures: who fills more groups
a second is given more of them, and who takes far longer than that is late. It knows samplers by their keys only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

LEAST_PATIENCE: Final = 5.0
"""Seconds for which nobody is called late: new weights may have to be fetched first."""
LATE: Final = 3.0
"""How many times as long as expected a sampler may take."""
_MEMORY: Final = 0.5
"""How much of a measured speed is the past's."""


class Spread(Protocol):
    """A way to share out work."""

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        """How many of so many groups each of the samplers fills; together that is all of them."""

    def patience(self, sampler: bytes, groups: int) -> float:
        """After how many seconds a sampler that was asked for so many groups is late."""

    def took(self, sampler: bytes, groups: int, seconds: float) -> None:
        """A sampler has filled so many groups in so long."""

    def kept_waiting(self, sampler: bytes, groups: int, seconds: float) -> None:
        """A sampler has not filled so many groups, in so long."""


class Evenly:
    """Equal shares, whoever is faster. Nobody is late before the deadline of its request."""

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        return [len(range(index, groups, len(samplers))) for index in range(len(samplers))]

    def patience(self, _sampler: bytes, _groups: int) -> float:
        return math.inf

    def took(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return

    def kept_waiting(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return


class BySpeed:
    """Shares in proportion to the groups a second that were measured; equal ones where nothing was."""

    def __init__(self) -> None:
        self._speeds: dict[bytes, float] = {}

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        """Where there are enough, everybody has one group at least, and so a chance to show that it has become faster."""
        if len(samplers) > groups:
            fastest = sorted(samplers, key=lambda each: -self._speed(each))[:groups]
            return [int(each in fastest) for each in samplers]
        rest = groups - len(samplers)
        together = sum(self._speed(each) for each in samplers)
        wanted = [rest * self._speed(each) / together for each in samplers]
        counts = [1 + math.floor(each) for each in wanted]
        by_remainder = sorted(
            range(len(samplers)), key=lambda index: math.floor(wanted[index]) - wanted[index]
        )
        for index in by_remainder[: groups - sum(counts)]:
            counts[index] += 1
        return counts

    def patience(self, sampler: bytes, groups: int) -> float:
        """A newcomer is expected to be no slower than the slowest that is known."""
        if not self._speeds:
            return math.inf
        expected = groups / self._speeds.get(sampler, min(self._speeds.values()))
        return max(LEAST_PATIENCE, LATE * expected)

    def took(self, sampler: bytes, groups: int, seconds: float) -> None:
        measured = groups / max(seconds, 1e-3)
        before = self._speeds.get(sampler, measured)
        self._speeds[sampler] = _MEMORY * before + (1 - _MEMORY) * measured

    def kept_waiting(self, sampler: bytes, groups: int, seconds: float) -> None:
        """That is the most that its speed can be."""
        most = groups / max(seconds, 1e-3)
        self._speeds[sampler] = min(self._speeds.get(sampler, most), most)

    def _speed(self, sampler: bytes) -> float:
        """What was measured, or the mean of what was measured of others."""
        mean = sum(self._speeds.values()) / len(self._speeds) if self._speeds else 1.0
        return self._speeds.get(sampler, mean)
