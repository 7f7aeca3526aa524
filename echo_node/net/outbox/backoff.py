"""Exponential backoff with full jitter, and a schedule of due times.

Times are those of a monotonic clock (`trio.current_time`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Waiting times of delivery, in seconds."""

    gather: float = 0.05
    """Seconds to wait for more items before some are sent together."""
    moment: float = 2.0
    """Seconds to wait for a receipt: the least time before an item is sent again."""
    first: float = 1.0
    """The longest pause after one failure; it doubles with each further one."""
    cap: float = 60.0
    """The longest pause of all."""
    deadline: float = 20.0
    """Seconds to wait for the response to one delivery."""

    def pause(self, tries: int, luck: float) -> float:
        """Return the pause after so many tries ("full jitter").

        `luck`, from 0 to 1, picks from none to the longest.
        """
        return luck * min(self.cap, self.first * 2.0 ** min(tries, 60))


class Schedule:
    """Names with the time at which each is due."""

    def __init__(self) -> None:
        self._due: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, name: bytes, due: float) -> None:
        """Set the time at which a name is due."""
        self._due[name] = due
        self._added += 1
        heapq.heappush(self._heap, (due, self._added, name))

    def advance(self, due: float) -> None:
        """Make everything due by a time at the latest."""
        self._due = {name: min(when, due) for name, when in self._due.items()}
        self._heap = [(when, place, name) for place, (name, when) in enumerate(self._due.items())]
        self._added = len(self._heap)
        heapq.heapify(self._heap)

    def next(self) -> float:
        """Return when the next name is due; infinity if there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, now: float) -> bytes | None:
        """Remove and return the name that has been due longest; None if none is due."""
        if self.next() > now:
            return None
        _, _, name = heapq.heappop(self._heap)
        del self._due[name]
        return name
