"""Interleaved pairs and their medians, as shared machines are noisy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

PAIRS = 7


def seconds_each(work: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of one call over a run of calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def interleaved(
    ours: Callable[[], object], bare: Callable[[], object], repeats: int
) -> list[tuple[float, float]]:
    """Time ours and the peer's turn by turn, alternating which goes first."""
    pairs = []
    for index in range(PAIRS):
        if index % 2:
            other, mine = seconds_each(bare, repeats), seconds_each(ours, repeats)
        else:
            mine, other = seconds_each(ours, repeats), seconds_each(bare, repeats)
        pairs.append((mine, other))
    return pairs


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """Our throughput over the peer's: the median over the pairs."""
    return statistics.median(other / mine for mine, other in pairs)


def median_times(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(mine for mine, _ in pairs), statistics.median(other for _, other in pairs)
