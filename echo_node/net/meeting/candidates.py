"""Peers that might be dialled: from whom each was heard, how often it failed, and who is next. Bounded, in memory.

What seeds, the book and the LAN say goes before what others tell; hearsay pays for each of its addresses, so that many
names for one address do not make many dials of it. It knows the clock that it is given, and no network.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from echo_node.net.meeting.places import Scope, usable
from protocol import limits

MOST: Final = 1_024
ADDRESSES: Final = 4_096
"""Addresses of hearsay whose last failure is remembered."""
PER_TELLER: Final = 128
"""Candidates that one peer may have told of; its newest replace its oldest."""
FIRST_PAUSE: Final = 0.5
LOST_SECONDS: Final = 900.0
"""How long a peer that was connected and went is looked for before others."""
HEARSAY_SECONDS: Final = 900.0
"""How long what others tell is kept."""


class Source(enum.IntEnum):
    """Where a candidate comes from, the better the lower."""

    LOST = 0
    """It was connected until a while ago."""
    SEED = 1
    LAN = 2
    BOOK = 3
    SUGGESTED = 4
    """Another part of this node found it, such as the DHT."""
    TOLD = 5
    """Another peer told of it."""

    @property
    def is_hearsay(self) -> bool:
        return self >= Source.SUGGESTED

    def cap(self, *, alone: bool) -> float:
        """The longest pause between two dials, in seconds. A node without any peer is in a hurry."""
        caps = {Source.LOST: 10.0, Source.SEED: 15.0, Source.LAN: 15.0, Source.BOOK: 30.0 if alone else 300.0}
        return caps.get(self, 60.0)

    @property
    def tries(self) -> float:
        """Failures in a row after which it is let go."""
        return 3 if self.is_hearsay else math.inf


@dataclasses.dataclass(slots=True)
class Candidate:
    """A peer that might be dialled."""

    public: bytes
    addresses: tuple[str, ...]
    source: Source
    teller: bytes | None
    since: float
    rank: float
    """Among candidates of one source, the lower the better."""
    is_seed: bool = False
    failures: int = 0
    not_before: float = 0.0


class Candidates:
    """Whom to dial next."""

    def __init__(
        self, me: bytes, clock: Callable[[], float], *, most: int = MOST, luck: random.Random | None = None
    ) -> None:
        self._me = me
        self._clock = clock
        self._most = most
        self._luck = luck or random.SystemRandom()
        self._all: dict[bytes, Candidate] = {}
        self._burnt: OrderedDict[str, tuple[int, float]] = OrderedDict()

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
        teller: bytes | None = None,
        least: Scope = Scope.LOOPBACK,
        rank: float | None = None,
    ) -> bool:
        """Take a candidate in, or what is new about one. What leads nowhere, or to ourselves, is not taken."""
        found = tuple(usable(addresses, public, least=least, most=limits.PEER_ADDRESSES))
        if not found or public == self._me:
            return False
        known = self._all.get(public)
        if known is not None:
            return self._update(known, found, source)
        if not self._make_room(source, teller):
            return False
        rank = self._luck.random() if rank is None else rank
        self._all[public] = Candidate(
            public, found, source, teller, self._clock(), rank, source is Source.SEED
        )
        return True

    def source_of(self, public: bytes) -> Source | None:
        return self._all[public].source if public in self._all else None

    def drop(self, public: bytes) -> None:
        self._all.pop(public, None)

    def next(self, skip: Collection[bytes], worst: Source = Source.TOLD) -> Candidate | None:
        """The best candidate that may be dialled now, by its usable addresses; None if there is none.

        Where no rank was given luck decides, so that newcomers do not all dial the same peer. The addresses of hearsay are closed
        for a while with this, whoever else is said to be there.
        """
        now = self._clock()
        self._age(now)
        due = [
            each
            for each in self._all.values()
            if each.source <= worst and each.not_before <= now and each.public not in skip
        ]
        for each in sorted(due, key=lambda one: (one.failures > 0, one.source, one.rank)):
            ways = [way for way in each.addresses if not each.source.is_hearsay or self._is_cool(way, now)]
            if ways:
                if each.source.is_hearsay:
                    for way in ways:
                        self._burn(way, now)
                return dataclasses.replace(each, addresses=tuple(ways))
        return None

    def due(self, skip: Collection[bytes]) -> float:
        """When somebody may be dialled next."""
        return min(
            (each.not_before for each in self._all.values() if each.public not in skip), default=math.inf
        )

    def reached(self, public: bytes) -> None:
        """Somebody is really there: the addresses are open again."""
        for way in self._all[public].addresses if public in self._all else ():
            self._burnt.pop(way, None)

    def settled(self, public: bytes) -> None:
        """It was connected for a while: nothing is held against it."""
        if (known := self._all.get(public)) is not None:
            known.failures, known.not_before = 0, 0.0

    def failed(self, public: bytes, *, alone: bool = False) -> Candidate | None:
        """It did not answer. Gives it back if it was let go for that."""
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

    def hurry(self, but: bytes | None = None) -> None:
        """Something changed, so all may be tried again at once: a new network, or the first peer after none.

        Whoever brought the news is left as it is: a peer that comes only to hang up does not clear its own name.
        """
        now = self._clock()
        for each in self._all.values():
            if not each.source.is_hearsay and each.public != but:
                each.failures = 0
                each.not_before = min(each.not_before, now + self._luck.random() * FIRST_PAUSE)

    def _age(self, now: float) -> None:
        for each in tuple(self._all.values()):
            if each.source is Source.LOST and now - each.since > LOST_SECONDS:
                each.source = Source.SEED if each.is_seed else Source.BOOK
            elif each.source.is_hearsay and now - each.since > HEARSAY_SECONDS:
                self.drop(each.public)

    def _update(self, known: Candidate, found: tuple[str, ...], source: Source) -> bool:
        if source.is_hearsay and not known.source.is_hearsay:
            return False  # what others tell changes nothing of what we know
        fresh = [way for way in found if way not in known.addresses]
        kept = found + tuple(way for way in known.addresses if way not in found)
        known.addresses = kept[: limits.PEER_ADDRESSES]
        known.is_seed = known.is_seed or source is Source.SEED
        if source < known.source or source is Source.LOST:
            known.source, known.since, known.teller = source, self._clock(), None
        if fresh and not source.is_hearsay:
            known.not_before = 0.0
        return bool(fresh)

    def _make_room(self, source: Source, teller: bytes | None) -> bool:
        """Let one go, so that nobody who tells much leaves no room for the others."""
        hearsay = [each for each in self._all.values() if each.source.is_hearsay]
        by_teller = Counter(each.teller for each in hearsay)
        if source.is_hearsay and by_teller[teller] >= PER_TELLER:
            self.drop(next(each.public for each in hearsay if each.teller == teller))
        elif len(self._all) >= self._most:
            if hearsay:
                loudest, _ = by_teller.most_common(1)[0]
                self.drop(next(each.public for each in hearsay if each.teller == loudest))
            elif source.is_hearsay:
                return False
            else:
                self.drop(
                    max(self._all.values(), key=lambda each: (each.source, each.failures, each.rank)).public
                )
        return True

    def _is_cool(self, way: str, now: float) -> bool:
        _, until = self._burnt.get(way, (0, 0.0))
        return until <= now

    def _burn(self, way: str, now: float) -> None:
        times, _ = self._burnt.pop(way, (0, 0.0))
        self._burnt[way] = (times + 1, now + self._pause(times + 3, Source.TOLD.cap(alone=False)))
        while len(self._burnt) > ADDRESSES:
            self._burnt.popitem(last=False)

    def _pause(self, failures: int, cap: float) -> float:
        """Doubling up to the cap, of which luck takes away up to a half."""
        return min(cap, FIRST_PAUSE * 2.0 ** min(failures, 30)) * (1 - self._luck.random() / 2)
