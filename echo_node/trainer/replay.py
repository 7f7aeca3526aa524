"""The replay buffer: groups that wait to be trained on. Bounded, fair, and nothing leaves it that is too stale.

Samplers take turns at the draw, so that one fast peer does not crowd out the rest; and once a batch is waiting, who holds
more than its share brings no more. An engine class that may fill a part of a batch has the same part of the room, so that
there is always some for those without whom no batch is complete. What was let in is never pushed out for somebody else's. It
knows steps, samplers and bounds; whether a group is honest, others say.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from echo_node.admission import Admitted
from echo_node.trainer.choosing import Entry, choose
from echo_node.trainer.classes import ClassShares

SAMPLERS_REMEMBERED: Final = 1024
"""Samplers among whom the room is shared out; those who have brought nothing for longest are forgotten first."""


class ReplayBuffer:
    """Groups that wait, by sampler. The bound S is kept at the draw, whatever was checked before."""

    def __init__(
        self,
        *,
        capacity: int,
        staleness: int,
        batch: int | None = None,
        entry: Entry | None = None,
        shares: ClassShares | None = None,
    ) -> None:
        self._capacity = capacity
        self._staleness = staleness
        self._batch = capacity if batch is None else batch
        self._entry = entry or Entry()
        self._shares = shares or ClassShares()
        self._waiting: dict[bytes, Admitted] = {}
        """By id, in the order of arrival."""
        self._held: Counter[bytes] = Counter()
        """By sampler."""
        self._classes: Counter[str] = Counter()
        """How many wait of each engine class."""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pressed = False
        """Whether somebody found no room since something was last taken out."""
        self.reserved: Counter[tuple[bytes, str]] = Counter()
        """Room, by sampler and engine class, for groups that are on their way to the disk."""
        self.dropped: Counter[str] = Counter()
        """How many groups were let go or not let in, by reason."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, group: bytes) -> bool:
        return group in self._waiting

    def __iter__(self) -> Iterator[Admitted]:
        return iter(tuple(self._waiting.values()))

    @property
    def samplers(self) -> int:
        """How many have groups here."""
        return sum(count > 0 for count in self._held.values())

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._capacity

    @property
    def is_short(self) -> bool:
        """Whether there are too few groups for a batch, whoever vouches for them: what a class has beyond its part is of no use."""
        return self._shares.usable(self._classes, self._batch) < self._batch

    @property
    def lacks_other_classes(self) -> bool:
        """Whether it is short, and has no room for more of a class that may fill a part of a batch only."""
        return self.is_short and any(
            self._classes[engine] >= max(1, self._most_waiting(engine)) for engine in self._shares.bounded
        )

    @property
    def hindrance(self) -> str | None:
        """Why a batch cannot be drawn though groups wait, in words, if that is for whose they are."""
        if not self.lacks_other_classes:
            return None
        return f"groups of other engine classes are missing: {self._shares.told(self._batch)}"

    def reserve(self, sampler: bytes, engine: str) -> bool:
        """Find room for a group of this sampler, until `reserved` is cleared; if there is none, that is counted.

        To ask is to be known as one who wants room.
        """
        if not self._has_room_for(sampler, engine):
            self.dropped["full"] += 1
            return False
        self.reserved[sampler, engine] += 1
        return True

    def _has_room_for(self, sampler: bytes, engine: str) -> bool:
        self._known[sampler] = None
        self._known.move_to_end(sampler)
        while len(self._known) > SAMPLERS_REMEMBERED:
            self._known.popitem(last=False)
        has_room = self._is_room_for(sampler, engine)
        self._pressed = self._pressed or not has_room
        return has_room

    def _is_room_for(self, sampler: bytes, engine: str) -> bool:
        classes, held = self._classes.copy(), self._held[sampler]
        for (whose, of), count in self.reserved.items():
            classes[of] += count
            held += count if whose == sampler else 0
        if classes.total() >= self._capacity:
            return False
        if engine in self._shares.bounded and classes[engine] >= self._most_waiting(engine):
            return False
        share = max(1, self._capacity // len(self._known))
        return held < share or self._shares.usable(classes, self._batch) < self._batch

    def _most_waiting(self, engine: str) -> int:
        """Of a class, as many batches' worth as there is room for: then a buffer that is full always has a batch."""
        return self._shares.most(engine, self._batch) * self._capacity // self._batch

    def add(self, group: Admitted) -> bool:
        """Keep a group, unless there is no room for it."""
        if not self._has_room_for(group.group.signer, group.group.message.engine):
            self.dropped["full"] += 1
            return False
        self.put(group)
        return True

    def put(self, group: Admitted) -> None:
        """Keep a group for which there was room, or which was let in before."""
        if group.group.id not in self._waiting:
            self._waiting[group.group.id] = group
            self._held[group.group.signer] += 1
            self._classes[group.group.message.engine] += 1

    def remove(self, groups: Iterable[bytes], reason: str) -> list[Admitted]:
        """Let groups go; returns those that were here."""
        gone = [self._take(group) for group in dict.fromkeys(groups) if group in self._waiting]
        if gone:
            self._pressed = False
            self.dropped[reason] += len(gone)
        return gone

    def remove_where(self, chosen: Callable[[Admitted], bool], reason: str) -> list[Admitted]:
        return self.remove([group.group.id for group in self if chosen(group)], reason)

    def make_room(self) -> list[Admitted]:
        """Where somebody finds no room, and what has it makes no batch, groups give way that nobody will vouch for any
        more. Else they would stop the run.
        """
        if not self._pressed:
            return []
        return self.remove_where(self._entry.gives_way, "unverified")

    def expire(self, step: int) -> list[Admitted]:
        """Let go of what may not be used at this step or later."""
        return self.remove_where(lambda group: step - group.step > self._staleness, "stale")

    def draw(self, count: int, step: int) -> tuple[Admitted, ...]:
        """So many groups that may still be used at this step, none if too few are there.

        Each sampler's oldest go first, one of each sampler in turn. They come sorted by step, sampler and slot.
        """
        self.expire(step)
        chosen = choose(self._in_turn(), count, self._entry, self._shares)
        if len(chosen) < count:
            return ()
        self._pressed = False
        for group in chosen:
            self._take(group.group.id)
        return tuple(sorted(chosen, key=lambda group: (group.step, group.order)))

    def _in_turn(self) -> list[Admitted]:
        """One of each sampler, then a second of each, and so on; within a round, the oldest first."""
        oldest_first = sorted(self._waiting.values(), key=lambda group: group.step)  # stable: then by arrival
        rounds: Counter[bytes] = Counter()
        placed = []
        for place, group in enumerate(oldest_first):
            placed.append((rounds[group.group.signer], place, group))
            rounds[group.group.signer] += 1
        return [group for _, _, group in sorted(placed, key=lambda each: each[:2])]

    def _take(self, group: bytes) -> Admitted:
        taken = self._waiting.pop(group)
        self._classes[taken.group.message.engine] -= 1
        self._held[taken.group.signer] -= 1
        if not self._held[taken.group.signer]:
            del self._held[taken.group.signer]
        return taken
