"""Narrow tolerance breaches that cluster over an engine class's proven peers.

A tolerance that is slightly too narrow for a class looks like many peers that breach it by little.
So the first narrow breach of a proven peer is left undecided, and once several proven peers of a
class have one within a day, so are all narrow breaches of that class, and the class is in doubt.

That is not for sale: only peers that were found honest often enough count, one alone never puts its
class in doubt, nor do many that are a small part of it, and what is undecided is not learnt from
and makes its sampler a newcomer again, all of whose groups are checked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from echo_node.runtime.reputation import NEWCOMER

NARROW: Final = 1.5
"""Largest multiple of a bound that is a narrow breach of it."""
FEWEST: Final = 3
"""Fewest proven peers whose narrow breaches put a class in doubt."""
SHARE: Final = 0.2
"""Least part of a class's proven peers that they must be."""
WINDOW: Final = 86_400.0
"""Seconds for which a peer's honest groups and its narrow breach count."""
PEERS: Final = 10_000
"""Pairs of class and peer that are remembered; the least recently seen is dropped."""


@dataclass(slots=True)
class _Peer:
    honest: int = 0
    seen: float = 0.0
    breached: float | None = None
    """When it breached narrowly as a proven peer."""


class ClassBreaches:
    """Honest groups and narrow breaches by class and peer.

    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[tuple[str, bytes], _Peer] = OrderedDict()

    def honest(self, peer: bytes, engine_class: str, now: float) -> None:
        """Record that a group of a peer was checked and found honest."""
        known = self._at(peer, engine_class, now)
        known.honest += 1

    def excuses(self, peer: bytes, engine_class: str, over: float, now: float) -> bool:
        """Record a breach by a multiple of the bound; return if left undecided."""
        known = self._at(peer, engine_class, now)
        if over > NARROW:
            del self._peers[engine_class, peer]
            return False
        first = known.honest >= NEWCOMER and not _is_recent(known.breached, now)
        if known.honest >= NEWCOMER:
            known.breached = now
        known.honest = 0
        return first or self.is_in_doubt(engine_class, now)

    def is_in_doubt(self, engine_class: str, now: float) -> bool:
        """Return whether narrow breaches cluster in a class."""
        breached, proven = self.count(engine_class, now)
        return breached >= FEWEST and breached >= SHARE * proven

    def count(self, engine_class: str, now: float) -> tuple[int, int]:
        """Return a class's proven peers with narrow breaches, and all of them."""
        recent = [
            known
            for (name, _), known in self._peers.items()
            if name == engine_class and now - known.seen < WINDOW
        ]
        breached = sum(_is_recent(known.breached, now) for known in recent)
        others = sum(known.honest >= NEWCOMER and not _is_recent(known.breached, now) for known in recent)
        return breached, breached + others

    def _at(self, peer: bytes, engine_class: str, now: float) -> _Peer:
        known = self._peers.setdefault((engine_class, peer), _Peer())
        self._peers.move_to_end((engine_class, peer))
        if now - known.seen >= WINDOW:
            known.honest = 0
        known.seen = now
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        return known


def _is_recent(at: float | None, now: float) -> bool:
    return at is not None and now - at < WINDOW
