"""Selection of a batch from waiting groups: oldest first, within the bounds.

There are three kinds of bounds: an `Entry` bounds unverified groups and those of young keys, and
shares bound engine classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Final

from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares


class Entrance(Enum):
    """Eligibility of a group for a batch."""

    OPEN = "open"
    BOUNDED = "bounded"
    """Up to a bound, together with other unverified groups."""
    CLOSED = "closed"
    """Not yet."""


YOUNG_SHARE: Final = 10
"""One group of a batch in so many may be of young keys, while others suffice."""


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

    @property
    def is_weighted(self) -> bool:
        """Return whether samplers have weights; else they are all equal."""
        return False

    def is_young(self, _sampler: bytes) -> bool:
        """Return whether a key is unproven; all such keys count as one sampler."""
        return False

    def weight(self, _sampler: bytes) -> float:
        """Return a proven sampler's weight where room is shared."""
        return 1.0


class _BatchBuilder:
    """A batch being filled, with room left by class, for unverified and young."""

    def __init__(self, count: int, entry: Entry, shares: ClassShares) -> None:
        self._count = count
        self._entry = entry
        self._bound = entry.bound(count)
        self._young = max(1, count // YOUNG_SHARE)
        self._shares = shares
        self._classes: Counter[str] = Counter()
        self._ids: set[bytes] = set()
        self.chosen: list[RolloutRecord] = []

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count

    def offer(self, group: RolloutRecord, *, bounded: bool, all_young: bool = False) -> None:
        """Add a group, unless it is in already or there is no room for it or its class.

        `all_young` lifts the bound on young keys.
        """
        engine = group.message.engine
        if self.is_full or group.id in self._ids or (bounded and self._bound <= 0):
            return
        young = self._entry.is_young(group.sampler)
        if young and not all_young and self._young <= 0:
            return
        if self._classes[engine] < self._shares.most(engine, self._count):
            self._bound -= bounded
            self._young -= young
            self._classes[engine] += 1
            self._ids.add(group.id)
            self.chosen.append(group)


def choose(
    groups: Sequence[RolloutRecord], count: int, entry: Entry, shares: ClassShares
) -> list[RolloutRecord]:
    """Return up to `count` groups for a batch of that size, the first ones first.

    If so many fit together, so many are found: young keys fill what proven ones leave. Where the
    order alone leaves a batch incomplete, because unverified groups have used up their classes'
    room, verified ones go first.
    """
    kinds = [(group, kind) for group in groups if (kind := entry.entrance(group)) is not Entrance.CLOSED]
    builder = _BatchBuilder(count, entry, shares)
    for all_young in (False, True):
        for group, kind in kinds:
            builder.offer(group, bounded=kind is Entrance.BOUNDED, all_young=all_young)
    if not builder.is_full and not entry.is_hard:
        for group, _ in kinds:
            builder.offer(group, bounded=False, all_young=True)
    elif not builder.is_full and shares.bounded:
        builder = _BatchBuilder(count, entry, shares)
        for group, kind in sorted(kinds, key=lambda each: each[1] is Entrance.BOUNDED):
            builder.offer(group, bounded=kind is Entrance.BOUNDED, all_young=True)
    return builder.chosen


def choose_most(groups: Sequence[RolloutRecord], entry: Entry, shares: ClassShares) -> list[RolloutRecord]:
    """Return as many of these groups as make up a batch of exactly that size."""
    chosen, size = [*groups], -1
    while len(chosen) != size:  # a smaller batch never has room for more than a larger one
        size = len(chosen)
        chosen = choose(groups, size, entry, shares)
    return chosen
