"""Selection of a batch from waiting groups: oldest first, within the bounds.

There are two kinds of bounds: an `Entry` bounds unverified groups, and shares bound engine classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares


class Entrance(Enum):
    """Whether a group may go into a batch."""

    OPEN = "open"
    BOUNDED = "bounded"
    """Up to a bound, together with other unverified groups."""
    CLOSED = "closed"
    """Not yet."""


class Entry:
    """Rule for which groups may go into a batch.

    This one admits all; `VerdictPolicy` is another.
    """

    @property
    def is_hard(self) -> bool:
        """Return whether the bound holds even when a batch stays incomplete for it."""
        return False

    def entrance(self, _group: RolloutRecord) -> Entrance:
        return Entrance.OPEN

    def bound(self, batch: int) -> int:
        """Return how many bounded groups a batch may have."""
        return batch

    def gives_way(self, _group: RolloutRecord) -> bool:
        """Return whether a group that may not go in will get no verdict any more."""
        return False


class _BatchBuilder:
    """A batch being filled, with the room left for classes and unverified groups."""

    def __init__(self, count: int, bound: int, shares: ClassShares) -> None:
        self._count = count
        self._bound = bound
        self._shares = shares
        self._classes: Counter[str] = Counter()
        self._ids: set[bytes] = set()
        self.chosen: list[RolloutRecord] = []

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count

    def offer(self, group: RolloutRecord, *, bounded: bool) -> None:
        """Add a group, unless it is in already or there is no room for it or its class."""
        engine = group.message.engine
        if self.is_full or group.id in self._ids or (bounded and self._bound <= 0):
            return
        if self._classes[engine] < self._shares.most(engine, self._count):
            self._bound -= bounded
            self._classes[engine] += 1
            self._ids.add(group.id)
            self.chosen.append(group)


def choose(
    groups: Sequence[RolloutRecord], count: int, entry: Entry, shares: ClassShares
) -> list[RolloutRecord]:
    """Return up to `count` groups for a batch of that size, the first ones first.

    If so many fit together, so many are found. Where the order alone leaves a batch incomplete,
    because unverified groups have used up their classes' room, verified ones go first.
    """
    kinds = [(group, kind) for group in groups if (kind := entry.entrance(group)) is not Entrance.CLOSED]
    builder = _BatchBuilder(count, entry.bound(count), shares)
    for group, kind in kinds:
        builder.offer(group, bounded=kind is Entrance.BOUNDED)
    if not builder.is_full and not entry.is_hard:
        for group, _ in kinds:
            builder.offer(group, bounded=False)
    elif not builder.is_full and shares.bounded:
        builder = _BatchBuilder(count, entry.bound(count), shares)
        for group, kind in sorted(kinds, key=lambda each: each[1] is Entrance.BOUNDED):
            builder.offer(group, bounded=kind is Entrance.BOUNDED)
    return builder.chosen


def choose_most(groups: Sequence[RolloutRecord], entry: Entry, shares: ClassShares) -> list[RolloutRecord]:
    """Return as many of these groups as make up a batch of exactly that size."""
    chosen, size = [*groups], -1
    while len(chosen) != size:  # a smaller batch never has room for more than a larger one
        size = len(chosen)
        chosen = choose(groups, size, entry, shares)
    return chosen
