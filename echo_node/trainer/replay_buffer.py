"""The replay buffer: bounded and fair; nothing too stale leaves it.

Samplers take turns at the draw, so that one fast peer does not crowd out the rest; and once a batch
is waiting, a sampler that holds more than its share adds no more. An engine class that may fill a
part of a batch has the same part of the room, so that there is always some for the classes without
which no batch is complete. A group that was let in is never evicted for another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.trainer.batch_selection import Entry, choose

SAMPLERS_REMEMBERED: Final = 1024
"""Most samplers that share the room; the longest idle are forgotten first."""


class ReplayBuffer:
    """Groups that wait, by sampler.

    The staleness bound is applied at the draw, whatever was checked before.
    """

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
        self._waiting: dict[bytes, RolloutRecord] = {}
        """Waiting groups by id, in the order of arrival."""
        self._held: Counter[bytes] = Counter()
        """Number of waiting groups, by sampler."""
        self._classes: Counter[str] = Counter()
        """Number of waiting groups, by engine class."""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pressed = False
        """Whether a group found no room since something was last taken out."""
        self.changed = ChangeSignal()
        """Notified when another batch may be drawn: groups have come, or verdicts on them."""
        self._reserved: Counter[tuple[bytes, str]] = Counter()
        """Room, by sampler and engine class, for groups that are being written to disk."""
        self.dropped: Counter[str] = Counter()
        """Number of groups dropped or not let in, by reason."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, group: bytes) -> bool:
        return group in self._waiting

    def __iter__(self) -> Iterator[RolloutRecord]:
        return iter(tuple(self._waiting.values()))

    @property
    def samplers(self) -> int:
        """Return the number of samplers with groups here."""
        return sum(count > 0 for count in self._held.values())

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._capacity

    @property
    def is_short(self) -> bool:
        """Return whether there are too few groups for a batch, verified or not.

        What a class has beyond its part does not count.
        """
        return self._shares.usable(self._classes, self._batch) < self._batch

    @property
    def lacks_other_classes(self) -> bool:
        """Return whether it is short, and full of a class that may fill only a part."""
        return self.is_short and any(
            self._classes[engine] >= max(1, self._most_waiting(engine)) for engine in self._shares.bounded
        )

    @property
    def hindrance(self) -> str | None:
        """Return why no batch can be drawn, in words, if that is for missing classes."""
        if not self.lacks_other_classes:
            return None
        return f"groups of other engine classes are missing: {self._shares.describe(self._batch)}"

    def reserve(self, sampler: bytes, engine: str) -> bool:
        """Reserve room for a group of this sampler; count it as dropped if there is none.

        The room is held until `clear_reservations`. The sampler counts from now on when room is
        shared.
        """
        if not self._has_room_for(sampler, engine):
            self.dropped["full"] += 1
            return False
        self._reserved[sampler, engine] += 1
        return True

    def clear_reservations(self) -> None:
        """Free reserved room: its groups are in the buffer now, or could not be kept."""
        self._reserved.clear()

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
        for (whose, of), count in self._reserved.items():
            classes[of] += count
            held += count if whose == sampler else 0
        if classes.total() >= self._capacity:
            return False
        if engine in self._shares.bounded and classes[engine] >= self._most_waiting(engine):
            return False
        share = max(1, self._capacity // len(self._known))
        return held < share or self._shares.usable(classes, self._batch) < self._batch

    def _most_waiting(self, engine: str) -> int:
        """Return the most groups of a class: so a full buffer always has a batch."""
        return self._shares.most(engine, self._batch) * self._capacity // self._batch

    def add(self, group: RolloutRecord) -> bool:
        """Keep a group, unless there is no room for it."""
        if not self._has_room_for(group.sampler, group.message.engine):
            self.dropped["full"] += 1
            return False
        self.put(group)
        return True

    def put(self, group: RolloutRecord) -> None:
        """Keep a group for which there was room, or which was let in before."""
        if group.id not in self._waiting:
            self._waiting[group.id] = group
            self._held[group.sampler] += 1
            self._classes[group.message.engine] += 1

    def remove(self, groups: Iterable[bytes], reason: str) -> list[RolloutRecord]:
        """Remove groups; return those that were here."""
        gone = [self._take(group) for group in dict.fromkeys(groups) if group in self._waiting]
        if gone:
            self._pressed = False
            self.dropped[reason] += len(gone)
        return gone

    def remove_where(self, chosen: Callable[[RolloutRecord], bool], reason: str) -> list[RolloutRecord]:
        return self.remove([group.id for group in self if chosen(group)], reason)

    def make_room(self) -> list[RolloutRecord]:
        """Drop groups that will get no verdict, where others find no room.

        Else they would stop the run.
        """
        if not self._pressed:
            return []
        return self.remove_where(self._entry.gives_way, "unverified")

    def expire(self, step: int) -> list[RolloutRecord]:
        """Drop groups that are too stale at this step."""
        return self.remove_where(lambda group: step - group.step > self._staleness, "stale")

    def draw(self, count: int, step: int) -> tuple[RolloutRecord, ...]:
        """Take `count` groups that are fresh at this step; none, if too few are here.

        Each sampler's oldest go first, one of each sampler in turn. They come sorted by step,
        sampler and slot.
        """
        self.expire(step)
        chosen = choose(self._in_turn(), count, self._entry, self._shares)
        if len(chosen) < count:
            return ()
        self._pressed = False
        for group in chosen:
            self._take(group.id)
        return tuple(sorted(chosen, key=lambda group: (group.step, group.order)))

    def _in_turn(self) -> list[RolloutRecord]:
        """Return one group of each sampler, then a second of each, and so on.

        Within a round, the oldest come first.
        """
        oldest_first = sorted(self._waiting.values(), key=lambda group: group.step)  # stable: then by arrival
        rounds: Counter[bytes] = Counter()
        placed = []
        for place, group in enumerate(oldest_first):
            placed.append((rounds[group.sampler], place, group))
            rounds[group.sampler] += 1
        return [group for _, _, group in sorted(placed, key=lambda each: each[:2])]

    def _take(self, group: bytes) -> RolloutRecord:
        taken = self._waiting.pop(group)
        self._classes[taken.message.engine] -= 1
        self._held[taken.sampler] -= 1
        if not self._held[taken.sampler]:
            del self._held[taken.sampler]
        return taken
