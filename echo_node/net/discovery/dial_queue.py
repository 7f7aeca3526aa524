"""Priority queue of peers to dial, with backoff; bounded and in memory.

Seeds, the address book and the LAN go before unverified peers. Unverified addresses back off one by
one, so that many peer ids for one address do not cause many dials of it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from echo_node.net.discovery.address_scope import Scope, usable
from protocol import limits

MOST: Final = 1_024
"""Candidates."""
ADDRESSES: Final = 4_096
"""Unverified addresses with a backoff."""
PER_REFERRER: Final = 128
"""Candidates that one peer may have referred; its newest replace its oldest."""
FIRST_PAUSE: Final = 0.5
"""Seconds before the first retry; doubled by each failure."""
LOST_SECONDS: Final = 900.0
"""Seconds for which a disconnected peer is dialled before others."""
UNVERIFIED_SECONDS: Final = 900.0
"""Seconds for which an unverified candidate is kept."""


class Source(enum.IntEnum):
    """Source of a candidate; lower is dialled first."""

    LOST = 0
    """Connected until recently."""
    SEED = 1
    LAN = 2
    BOOK = 3
    SUGGESTED = 4
    """Found by another part of this node, such as the DHT."""
    REFERRED = 5
    """Named by another peer in peer exchange."""

    @property
    def is_unverified(self) -> bool:
        return self >= Source.SUGGESTED

    def cap(self, *, alone: bool) -> float:
        """Return the longest pause between dials, in seconds; shorter without peers."""
        caps = {Source.LOST: 10.0, Source.SEED: 15.0, Source.LAN: 15.0, Source.BOOK: 30.0 if alone else 300.0}
        return caps.get(self, 60.0)

    @property
    def tries(self) -> float:
        """Consecutive failures after which the candidate is dropped."""
        return 3 if self.is_unverified else math.inf


@dataclasses.dataclass(slots=True)
class Candidate:
    """A peer to dial."""

    public: bytes
    addresses: tuple[str, ...]
    source: Source
    referrer: bytes | None
    """The peer that named it."""
    since: float
    rank: float
    """Order among candidates of one source; lower is first."""
    is_seed: bool = False
    failures: int = 0
    not_before: float = 0.0


class DialQueue:
    """Candidates by priority, with their backoff."""

    def __init__(
        self, me: bytes, clock: Callable[[], float], *, most: int = MOST, luck: random.Random | None = None
    ) -> None:
        self._me = me
        self._clock = clock
        self._most = most
        self._luck = luck or random.SystemRandom()
        self._all: dict[bytes, Candidate] = {}
        self._backoff: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(tuple(self._all.values()))

    def __contains__(self, public: bytes) -> bool:
        return public in self._all

    def add(
        self,
        public: bytes,
        addresses: Iterable[str],
        source: Source,
        *,
        referrer: bytes | None = None,
        least: Scope = Scope.LOOPBACK,
        rank: float | None = None,
    ) -> bool:
        """Add or update a candidate; return whether anything is new.

        Addresses that cannot be dialled, and this node itself, are refused.
        """
        found = tuple(usable(addresses, public, least=least, most=limits.PEER_ADDRESSES))
        if not found or public == self._me:
            return False
        known = self._all.get(public)
        if known is not None:
            return self._update(known, found, source)
        if not self._make_room(source, referrer):
            return False
        rank = self._luck.random() if rank is None else rank
        self._all[public] = Candidate(
            public, found, source, referrer, self._clock(), rank, source is Source.SEED
        )
        return True

    def source_of(self, public: bytes) -> Source | None:
        return self._all[public].source if public in self._all else None

    def drop(self, public: bytes) -> None:
        self._all.pop(public, None)

    def next(self, skip: Collection[bytes], worst: Source = Source.REFERRED) -> Candidate | None:
        """Return the best candidate that may be dialled now, with its dialable addresses.

        Without a rank the order is random, so that new nodes do not all dial the same peer. The
        addresses of an unverified candidate back off with this call, for every peer id.
        """
        now = self._clock()
        self._age(now)
        due = [
            each
            for each in self._all.values()
            if each.source <= worst and each.not_before <= now and each.public not in skip
        ]
        for each in sorted(due, key=lambda one: (one.failures > 0, one.source, one.rank)):
            ways = [
                way for way in each.addresses if not each.source.is_unverified or self._may_dial(way, now)
            ]
            if ways:
                if each.source.is_unverified:
                    for way in ways:
                        self._back_off(way, now)
                return dataclasses.replace(each, addresses=tuple(ways))
        return None

    def due(self, skip: Collection[bytes]) -> float:
        """Return the time at which the next candidate may be dialled."""
        return min(
            (each.not_before for each in self._all.values() if each.public not in skip), default=math.inf
        )

    def reached(self, public: bytes) -> None:
        """End the backoff of the addresses of a peer that answered."""
        for way in self._all[public].addresses if public in self._all else ():
            self._backoff.pop(way, None)

    def settled(self, public: bytes) -> None:
        """Reset the failures of a peer that was connected for a while."""
        if (known := self._all.get(public)) is not None:
            known.failures, known.not_before = 0, 0.0

    def failed(self, public: bytes, *, alone: bool = False) -> Candidate | None:
        """Count a failed dial; return the candidate if it was dropped for that."""
        now = self._clock()
        known = self._all.get(public)
        if known is None:
            return None
        known.failures += 1
        known.not_before = now + self._pause(known.failures, known.source.cap(alone=alone))
        if known.failures >= known.source.tries:
            self.drop(public)
            return known
        return None

    def retry_now(self, but: bytes | None = None) -> None:
        """Retry verified candidates at once, after a network change or the first new peer.

        The peer `but`, whose connection caused this, keeps its failures: connecting only to hang up
        does not reset them.
        """
        now = self._clock()
        for each in self._all.values():
            if not each.source.is_unverified and each.public != but:
                each.failures = 0
                each.not_before = min(each.not_before, now + self._luck.random() * FIRST_PAUSE)

    def _age(self, now: float) -> None:
        for each in tuple(self._all.values()):
            if each.source is Source.LOST and now - each.since > LOST_SECONDS:
                each.source = Source.SEED if each.is_seed else Source.BOOK
            elif each.source.is_unverified and now - each.since > UNVERIFIED_SECONDS:
                self.drop(each.public)

    def _update(self, known: Candidate, found: tuple[str, ...], source: Source) -> bool:
        if source.is_unverified and not known.source.is_unverified:
            return False  # unverified addresses do not change a verified candidate
        fresh = [way for way in found if way not in known.addresses]
        kept = found + tuple(way for way in known.addresses if way not in found)
        known.addresses = kept[: limits.PEER_ADDRESSES]
        known.is_seed = known.is_seed or source is Source.SEED
        if source < known.source or source is Source.LOST:
            known.source, known.since, known.referrer = source, self._clock(), None
        if fresh and not source.is_unverified:
            known.not_before = 0.0
        return bool(fresh)

    def _make_room(self, source: Source, referrer: bytes | None) -> bool:
        """Drop a candidate if need be, so that no referrer crowds out the others."""
        unverified = [each for each in self._all.values() if each.source.is_unverified]
        by_referrer = Counter(each.referrer for each in unverified)
        if source.is_unverified and by_referrer[referrer] >= PER_REFERRER:
            self.drop(next(each.public for each in unverified if each.referrer == referrer))
        elif len(self._all) >= self._most:
            if unverified:
                busiest, _ = by_referrer.most_common(1)[0]
                self.drop(next(each.public for each in unverified if each.referrer == busiest))
            elif source.is_unverified:
                return False
            else:
                self.drop(
                    max(self._all.values(), key=lambda each: (each.source, each.failures, each.rank)).public
                )
        return True

    def _may_dial(self, way: str, now: float) -> bool:
        _, until = self._backoff.get(way, (0, 0.0))
        return until <= now

    def _back_off(self, way: str, now: float) -> None:
        times, _ = self._backoff.pop(way, (0, 0.0))
        self._backoff[way] = (times + 1, now + self._pause(times + 3, Source.REFERRED.cap(alone=False)))
        while len(self._backoff) > ADDRESSES:
            self._backoff.popitem(last=False)

    def _pause(self, failures: int, cap: float) -> float:
        """Return a pause that doubles up to the cap, less a random part of up to a half."""
        return min(cap, FIRST_PAUSE * 2.0 ** min(failures, 30)) * (1 - self._luck.random() / 2)
