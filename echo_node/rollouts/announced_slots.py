"""Announced slots of samplers, and those whose groups never came.

Draws are fixed by head, key and slot, so a sampler could draw many groups and send the best. An
announcement commits it to all slots of a head up to a number: a slot below that which never came is
a hole. Holes prove nothing alone, since volunteers sleep and die; they cut how many of a sampler's
groups are trusted unseen, in proportion. A leader's request counts as an announcement of what it
asks for. Groups that come when their head is over fill their holes as far as few do: else a sampler
would send what it likes in time, and the rest late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from protocol import Envelope, SlotAnnouncement

AHEAD: Final = 512
"""Slots that may be announced beyond the number that arrived, per head and sampler."""
SAMPLERS: Final = 16_384
"""Samplers whose kept shares are remembered; the least recently seen are dropped."""
OVER: Final = 4_096
"""Pairs of head and sampler that are over and whose holes may still be filled by late groups."""
MEMORY: Final = 256.0
"""Announced slots over which a kept share is averaged: older ones count half at each doubling."""
LEAST_SHARE: Final = 0.05
"""Kept share of a sampler of which nothing comes: what does come still has a place in the queue."""
LATE_SHARE: Final = 0.1
"""Share of a sampler's announced slots that may come late without being holes."""
PRIOR: Final = 8.0
"""Slots that count as announced and kept of every sampler, so that one lost group is no verdict."""


def is_announcement(envelope: Envelope) -> bool:
    return envelope.kind == SlotAnnouncement.KIND


@dataclass(slots=True)
class _Block:
    """Announced slots of one head and sampler: all below `until`."""

    until: int = 0
    newest: bytes = b""
    """Id of the announcement that reaches furthest."""
    came: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Kept:
    """Announced slots of a sampler under heads that are over, and those that came."""

    announced: float = PRIOR
    came: float = PRIOR
    late: float = 0.0
    """Slots of those that came when their head was over."""
    credit: float = 0.0
    """Groups that may still be trusted unseen; every arrival adds the kept share."""


class AnnouncedSlots:
    """Announcements by head and sampler; past heads are settled and forgotten."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, bytes], _Block] = {}
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._exempt: frozenset[bytes] = frozenset()
        self._over: OrderedDict[tuple[bytes, bytes], set[int]] = OrderedDict()
        """Holes under heads that are over: their groups may have been late."""

    def exempt(self, heads: Collection[bytes]) -> None:
        """Ask for no announcements under these heads: they are older than this process.

        Whether groups of theirs were announced was seen by the leader before, if at all.
        """
        self._exempt = frozenset(heads)

    def announce(self, sampler: bytes, message: SlotAnnouncement, announcement: bytes) -> str | None:
        """Record an announcement, or return the receipt's reason to refuse it.

        The newest one comes again when its receipt got lost, and is taken again.
        """
        block = self._blocks.setdefault((message.head, sampler), _Block())
        until = message.first + message.count
        if until > len(block.came) + AHEAD:
            return "over-limit"
        if until <= block.until and announcement != block.newest:
            return "duplicate"
        block.until, block.newest = max(until, block.until), announcement
        return None

    def requested(self, head: bytes, sampler: bytes, until: int) -> None:
        """Count all slots below `until` as announced: the leader asked for them.

        A sampler that sees what it has drawn and then does not answer leaves holes.
        """
        block = self._blocks.setdefault((head, sampler), _Block())
        block.until = max(block.until, until)

    def arrived(self, head: bytes, sampler: bytes, slot: int) -> bool:
        """Record an arrived group, whatever its fate; return if it was announced."""
        block = self._blocks.setdefault((head, sampler), _Block())
        block.came.add(slot)
        return slot < block.until or head in self._exempt

    def holes(self, head: bytes, sampler: bytes) -> list[int]:
        """Return the announced slots that have not come, in ascending order."""
        block = self._blocks.get((head, sampler), _Block())
        return [slot for slot in range(block.until) if slot not in block.came]

    @property
    def under_way(self) -> int:
        """Return the announced slots under current heads that have not come."""
        return sum(
            block.until - sum(slot < block.until for slot in block.came) for block in self._blocks.values()
        )

    def until(self, head: bytes, sampler: bytes) -> int:
        """Return the first slot that was neither announced nor came."""
        block = self._blocks.get((head, sampler), _Block())
        return max(block.until, max(block.came, default=-1) + 1)

    def settle(self, current: Collection[bytes]) -> None:
        """Count the missing slots of heads not among these, and forget those heads."""
        for key in [key for key in self._blocks if key[0] not in current]:
            block = self._blocks.pop(key)
            if block.until and key[0] not in self._exempt:
                kept = self._of(key[1])
                kept.announced += block.until
                holes = {slot for slot in range(block.until) if slot not in block.came}
                kept.came += block.until - len(holes)
                if kept.announced > MEMORY:
                    kept.announced, kept.came = kept.announced / 2, kept.came / 2
                    kept.late /= 2
                if holes:
                    self._over[key] = holes
                    if len(self._over) > OVER:
                        self._over.popitem(last=False)

    def was_late(self, head: bytes, sampler: bytes, slot: int) -> None:
        """Fill a hole with a group that came when its head was over, unless many did."""
        holes = self._over.get((head, sampler), set())
        if slot in holes:
            holes.remove(slot)
            kept = self._of(sampler)
            if kept.late + 1 <= LATE_SHARE * kept.announced:
                kept.late += 1
                kept.came = min(kept.announced, kept.came + 1)

    def kept_share(self, sampler: bytes) -> float:
        """Return the share of a sampler's announced slots that came, of past heads."""
        kept = self._kept.get(sampler)
        return 1.0 if kept is None else max(LEAST_SHARE, kept.came / kept.announced)

    def trusts_next(self, sampler: bytes) -> bool:
        """Return whether a sampler's next group may be trusted unseen.

        Its kept share decides. In the order of arrival, so that no sampler can choose which of its
        groups those are.
        """
        kept = self._of(sampler)
        kept.credit = min(2.0, kept.credit + self.kept_share(sampler))
        if kept.credit < 1.0:
            return False
        kept.credit -= 1.0
        return True

    def _of(self, sampler: bytes) -> _Kept:
        kept = self._kept.setdefault(sampler, _Kept())
        self._kept.move_to_end(sampler)
        if len(self._kept) > SAMPLERS:
            self._kept.popitem(last=False)
        return kept
