"""Split of a batch among samplers, and how long each is waited for.

`EvenSplit` gives the same shares whatever happens, so that a run repeats bit for bit. `SpeedSplit`
measures groups a second: a faster sampler is given more groups, and one that takes far longer than
expected is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from echo_node.trainer.batch_selection import YOUNG_SHARE
from protocol import limits

LEAST_PATIENCE: Final = 5.0
"""Seconds before any sampler is late: new weights may have to be fetched first."""
LATE: Final = 3.0
"""Factor of the expected time after which a sampler is late."""
_MEMORY: Final = 0.5
"""Weight of the previous speed in the moving average."""


def bound_young(
    samplers: Mapping[bytes, str], is_young: Callable[[bytes], bool], turn: int
) -> dict[bytes, str]:
    """Return the samplers to ask: all proven ones, and of young keys one in so many.

    Young keys take turns, by the number of the step. If there are no proven samplers, all are
    asked.
    """
    young = [key for key in samplers if is_young(key)]
    proven = len(samplers) - len(young)
    if not proven or not young:
        return dict(samplers)
    room = max(1, proven // (YOUNG_SHARE - 1))
    chosen = {young[(turn * room + place) % len(young)] for place in range(room)}
    return {key: engine for key, engine in samplers.items() if key in chosen or not is_young(key)}


class WorkSplit(Protocol):
    """Interface of a way to share out work."""

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        """Return how many groups each of the samplers fills; together that is all."""

    def patience(self, sampler: bytes, groups: int) -> float:
        """Return the seconds after which a sampler with so many groups to fill is late."""

    def took(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Record that a sampler has filled so many groups in so long."""

    def kept_waiting(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Record that a sampler has not filled so many groups in so long."""


class EvenSplit:
    """Equal shares, whatever the speed.

    No sampler is late before its request's deadline.
    """

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        return [len(range(index, groups, len(samplers))) for index in range(len(samplers))]

    def patience(self, _sampler: bytes, _groups: int) -> float:
        return math.inf

    def took(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return

    def kept_waiting(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return


class SpeedSplit:
    """Shares in proportion to measured groups a second; equal ones before that."""

    def __init__(self) -> None:
        self._speeds: dict[bytes, float] = {}

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        """Return the shares; where there are enough groups, at least one for each sampler.

        So each has a chance to show that it has become faster.
        """
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
        """Return the patience; a newcomer is assumed as fast as the slowest known."""
        if not self._speeds:
            return math.inf
        expected = groups / self._speeds.get(sampler, min(self._speeds.values()))
        return max(LEAST_PATIENCE, LATE * expected)

    def took(self, sampler: bytes, groups: int, seconds: float) -> None:
        measured = groups / max(seconds, 1e-3)
        before = self._speeds.get(sampler, measured)
        self._speeds[sampler] = _MEMORY * before + (1 - _MEMORY) * measured

    def kept_waiting(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Bound the measured speed by what the sampler has not achieved."""
        most = groups / max(seconds, 1e-3)
        self._speeds[sampler] = min(self._speeds.get(sampler, most), most)

    def _speed(self, sampler: bytes) -> float:
        """Return the measured speed, or the mean of the others'."""
        mean = sum(self._speeds.values()) / len(self._speeds) if self._speeds else 1.0
        return self._speeds.get(sampler, mean)


ROOM: Final = 0.5
"""Share of the deadline that a larger request may be expected to take."""


class RequestSizes:
    """Largest request for each sampler that was too slow; others have the wire limit."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._most: dict[bytes, int] = {}

    def most(self, sampler: bytes) -> int:
        return self._most.get(sampler, limits.BATCH)

    def missed(self, sampler: bytes, groups: int) -> None:
        """Halve the request size after a missed deadline."""
        self._most[sampler] = max(1, groups // 2)

    def filled(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Raise the request size after groups were filled in time."""
        fits = int(ROOM * self._deadline * groups / max(seconds, 1e-3))
        if sampler in self._most and fits > self._most[sampler]:
            self._most[sampler] = min(fits, limits.BATCH)
