"""Which of the groups that wait make a batch: the first ones first, within every bound on what a batch may hold.

There are two kinds of bounds: on what nobody has vouched for, by an `Entry`, and on engine classes, by their shares. It knows
groups and numbers, and neither buffers nor peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from echo_node.admission import Admitted
from echo_node.trainer.classes import ClassShares


class Entrance(Enum):
    """Whether a group may go into a batch."""

    OPEN = "open"
    BOUNDED = "bounded"
    """Together with others of its kind, up to a bound."""
    CLOSED = "closed"
    """Not yet."""


class Entry:
    """Who may go into a batch. This one lets everybody in; `verdicts` knows others."""

    @property
    def is_hard(self) -> bool:
        """Whether the bound holds even when there are not enough others for a batch."""
        return False

    def entrance(self, _group: Admitted) -> Entrance:
        return Entrance.OPEN

    def bound(self, batch: int) -> int:
        """How many bounded groups a batch may have."""
        return batch

    def gives_way(self, _group: Admitted) -> bool:
        """Whether nobody will vouch for a group any more that may not go in as it is."""
        return False


class _Room:
    """A batch that is being filled: what is in it, and what is left for each class and for what nobody vouches for."""

    def __init__(self, count: int, bound: int, shares: ClassShares) -> None:
        self._count = count
        self._bound = bound
        self._shares = shares
        self._classes: Counter[str] = Counter()
        self._ids: set[bytes] = set()
        self.chosen: list[Admitted] = []

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count

    def offer(self, group: Admitted, *, bounded: bool) -> None:
        """Take a group, unless it is here or there is no room for it, its class or its kind."""
        engine = group.group.message.engine
        if self.is_full or group.group.id in self._ids or (bounded and self._bound <= 0):
            return
        if self._classes[engine] < self._shares.most(engine, self._count):
            self._bound -= bounded
            self._classes[engine] += 1
            self._ids.add(group.group.id)
            self.chosen.append(group)


def choose(groups: Sequence[Admitted], count: int, entry: Entry, shares: ClassShares) -> list[Admitted]:
    """Up to so many groups for a batch of that size, the first ones first.

    If so many fit together, so many are found. Where turns alone leave a batch incomplete, since groups that nobody vouches
    for have taken the room of their classes, those that somebody vouches for go first.
    """
    kinds = [(group, kind) for group in groups if (kind := entry.entrance(group)) is not Entrance.CLOSED]
    room = _Room(count, entry.bound(count), shares)
    for group, kind in kinds:
        room.offer(group, bounded=kind is Entrance.BOUNDED)
    if not room.is_full and not entry.is_hard:
        for group, _ in kinds:
            room.offer(group, bounded=False)
    elif not room.is_full and shares.bounded:
        room = _Room(count, entry.bound(count), shares)
        for group, kind in sorted(kinds, key=lambda each: each[1] is Entrance.BOUNDED):
            room.offer(group, bounded=kind is Entrance.BOUNDED)
    return room.chosen


def choose_most(groups: Sequence[Admitted], entry: Entry, shares: ClassShares) -> list[Admitted]:
    """As many of these groups as make up a batch of just that size."""
    chosen, size = [*groups], -1
    while len(chosen) != size:  # a smaller batch never has room for more than a larger one
        size = len(chosen)
        chosen = choose(groups, size, entry, shares)
    return chosen
