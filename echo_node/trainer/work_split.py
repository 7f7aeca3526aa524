"""Split of a batch among samplers.

`EvenSplit` gives the same shares whatever happens, so that a run repeats bit for bit. `SpeedSplit`
measures groups a second: a faster sampler is given more groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from echo_node.trainer.batch_selection import YOUNG_SHARE

LEAST_PATIENCE: Final = 5.0
"""Seconds before any sampler is late: new weights may have to be fetched first."""
EVEN_PATIENCE: Final = 60.0
"""The same where shares are even, so that a passing delay does not change a batch."""
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

    least_patience: float
    """Seconds before any sampler is late."""

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        """Return how many groups each of the samplers fills; together that is all."""

    def took(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Record that a sampler has filled so many groups in so long."""

    def kept_waiting(self, sampler: bytes, groups: int, seconds: float) -> None:
        """Record that a sampler has not filled so many groups in so long."""


class EvenSplit:
    """Equal shares, whatever the speed."""

    least_patience = EVEN_PATIENCE

    def shares(self, samplers: Sequence[bytes], groups: int) -> list[int]:
        return [len(range(index, groups, len(samplers))) for index in range(len(samplers))]

    def took(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return

    def kept_waiting(self, _sampler: bytes, _groups: int, _seconds: float) -> None:
        return


class SpeedSplit:
    """Shares in proportion to measured groups a second; equal ones before that."""

    least_patience = LEAST_PATIENCE

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
