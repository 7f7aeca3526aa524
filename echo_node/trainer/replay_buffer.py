"""The replay buffer: bounded and fair; nothing too stale leaves it.

Samplers take turns at the draw, so that one fast peer does not crowd out the rest; and once a batch
is waiting, a sampler that holds more than its share adds no more. Where groups are verified, turns
and shares follow the weights of samplers, all young keys count as one, and every second group of a
batch and half of the room go by arrival alone: so shares follow the work that is done, and weights
keep their holders from being crowded out, but no number of keys adds to either. An engine class
that may fill a part of a batch has the same part of the room, so that there is always some for the
classes without which no batch is complete. A group that was let in is never evicted for another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.trainer.batch_selection import YOUNG_SHARE, Entry, choose
from echo_node.trainer.fair_queue import FairQueue

SAMPLERS_REMEMBERED: Final = 1024
"""Most samplers that share the room; the longest idle are forgotten first."""
_YOUNG: Final = b""
"""Account of all young keys together."""
_STALE_WEIGHTS: Final = 256
"""Groups that may come before the sum of all weights is computed again."""


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
        self._queue = FairQueue()
        self._weights: float | None = None
        """Sum of the weights of all samplers, or None if it is to be computed."""
        self._arrived = 0
        """Number of groups since then."""
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
        if self._shares.usable(classes, self._batch) < self._batch:
            return True
        if not self._entry.is_weighted:
            return held < max(1, self._capacity // len(self._known))
        if classes.total() < self._capacity // 2:
            return True
        if self._entry.is_young(sampler):
            held = sum(count for key, count in self._held.items() if self._entry.is_young(key))
            held += sum(count for (key, _), count in self._reserved.items() if self._entry.is_young(key))
        return held < max(1, int(self._capacity * self._share_of(sampler)))

    def _share_of(self, sampler: bytes) -> float:
        """Return the share of the room that is a proven sampler's, or all young keys'."""
        self._arrived += 1
        if self._weights is None or self._arrived > _STALE_WEIGHTS:
            proven = (key for key in self._known if not self._entry.is_young(key))
            self._weights, self._arrived = sum(map(self._entry.weight, proven)), 0
        if self._entry.is_young(sampler):
            return 1 / YOUNG_SHARE if self._weights else 1.0
        weight = self._entry.weight(sampler)
        return weight / max(weight, self._weights)

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

        Each sampler's oldest go first, one of each sampler in turn or by weight. They come sorted
        by step, sampler and slot.
        """
        self.expire(step)
        oldest_first = sorted(self._waiting.values(), key=lambda group: group.step)  # stable: then by arrival
        accounts = [self._account(group.sampler) for group in oldest_first]
        weight = self._weigher(accounts)
        tags = self._queue.start_tags(accounts, weight)
        by_weight = [oldest_first[place] for place in sorted(range(len(tags)), key=lambda each: tags[each])]
        if self._entry.is_weighted:
            by_weight = [group for pair in zip(by_weight, oldest_first, strict=True) for group in pair]
        chosen = choose(by_weight, count, self._entry, self._shares)
        if len(chosen) < count:
            return ()
        self._pressed, self._weights = False, None
        ids = {group.id for group in chosen}
        served = zip(accounts, tags, oldest_first, strict=True)
        self._queue.served(((account, tag) for account, tag, group in served if group.id in ids), weight)
        for group in chosen:
            self._take(group.id)
        return tuple(sorted(chosen, key=lambda group: (group.step, group.order)))

    def _account(self, sampler: bytes) -> bytes:
        return _YOUNG if self._entry.is_young(sampler) else sampler

    def _weigher(self, accounts: Iterable[bytes]) -> Callable[[bytes], float]:
        """Return the weights at a draw; young keys have a tenth of all together."""
        weights = {each: self._entry.weight(each) for each in {*accounts} if each != _YOUNG}
        weights[_YOUNG] = sum(weights.values()) / (YOUNG_SHARE - 1) or 1.0
        return weights.__getitem__

    def _take(self, group: bytes) -> RolloutRecord:
        taken = self._waiting.pop(group)
        self._classes[taken.message.engine] -= 1
        self._held[taken.sampler] -= 1
        if not self._held[taken.sampler]:
            del self._held[taken.sampler]
        return taken
