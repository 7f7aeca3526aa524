"""The replay buffer: groups that wait to be trained on. Bounded, and nothing leaves it that is too stale.

It knows steps and bounds; whether a group is honest was settled before.
"""

from __future__ import annotations

from collections import Counter

from echo_node.admission import Admitted


class ReplayBuffer:
    """Groups in the order of their steps, oldest first. The bound S is kept at the draw, whatever was checked before."""

    def __init__(self, *, capacity: int, staleness: int) -> None:
        self._capacity = capacity
        self._staleness = staleness
        self._waiting: list[Admitted] = []
        self.dropped: Counter[str] = Counter()
        """How many groups were let go, by reason."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._capacity

    def add(self, group: Admitted) -> bool:
        """Keep a group, unless there is no room."""
        if self.full:
            self.dropped["full"] += 1
            return False
        self._waiting.append(group)
        return True

    def draw(self, count: int, step: int) -> tuple[Admitted, ...]:
        """The oldest groups that may still be used at this step, sorted by sampler and slot; none if too few are there."""
        fresh = [group for group in self._waiting if step - group.step <= self._staleness]
        self.dropped["stale"] += len(self._waiting) - len(fresh)
        self._waiting = fresh
        if len(fresh) < count:
            return ()
        fresh.sort(key=lambda group: group.step)  # stable: within a step, the order of arrival
        drawn, self._waiting = fresh[:count], fresh[count:]
        return tuple(sorted(drawn, key=lambda group: (group.step, group.order)))
