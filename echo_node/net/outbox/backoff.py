"""When to try again: pauses that double up to a cap, spread by luck, and a list of what is due when.

Times are those of a clock that never goes back (`trio.current_time`). It knows neither what is due nor what is done then.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what, in seconds."""

    gather: float = 0.05
    """For more items, before some are sent together."""
    moment: float = 2.0
    """For a receipt of what was just sent: the least time before it is sent again."""
    first: float = 1.0
    """The longest pause after one failure; it doubles with each further one."""
    cap: float = 60.0
    """The longest pause of all."""
    deadline: float = 20.0
    """For the answer to one delivery."""

    def pause(self, tries: int, luck: float) -> float:
        """The pause after so many tries, where luck from 0 to 1 picks from nothing to the most ("full jitter")."""
        return luck * min(self.cap, self.first * 2.0 ** min(tries, 60))


class Schedule:
    """Names, each with the time when it is due."""

    def __init__(self) -> None:
        self._due: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, name: bytes, due: float) -> None:
        """Have it due then, and at no other time."""
        self._due[name] = due
        self._added += 1
        heapq.heappush(self._heap, (due, self._added, name))

    def hurry(self, due: float) -> None:
        """Have everything due by then."""
        self._due = {name: min(when, due) for name, when in self._due.items()}
        self._heap = [(when, place, name) for place, (name, when) in enumerate(self._due.items())]
        self._added = len(self._heap)
        heapq.heapify(self._heap)

    def next(self) -> float:
        """When the next one is due; never, if there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, now: float) -> bytes | None:
        """The one that has been due longest, if any is due by now; it is due no more."""
        if self.next() > now:
            return None
        _, _, name = heapq.heappop(self._heap)
        del self._due[name]
        return name
