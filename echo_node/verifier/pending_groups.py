"""Bounded buffer of groups that arrive before their head.

A sampler that pulls faster than this verifier is not at fault, and under the quorum policy a step
would wait for groups that were dropped. The groups are still unchecked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from protocol import Envelope

SECONDS: Final = 60.0
"""Seconds that a group is kept: as long as a trainer waits for a verdict."""
OF_ONE: Final = 64
"""Groups of one sampler: as many slots as may be missing between those that it filled."""
IN_ALL: Final = 1_024
"""Groups of all samplers."""
BYTES: Final = 32 << 20
"""Sealed bytes of all groups."""


class PendingGroups:
    """Pending groups by sampler and arrival.

    The sampler with most loses its oldest first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[float, Envelope, frozenset[bytes]]] = OrderedDict()
        """Arrival time, group, and the heads that it was drawn under."""
        self._of: dict[bytes, OrderedDict[bytes, None]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, group: bytes) -> bool:
        return group in self._kept

    def keep(self, envelope: Envelope, heads: Iterable[bytes]) -> None:
        """Keep a group that was drawn under these heads; ignore it if it is already kept."""
        if envelope.id in self._kept:
            return
        self._expire()
        own = self._of.setdefault(envelope.signer, OrderedDict())
        own[envelope.id] = None
        self._kept[envelope.id] = (self._clock(), envelope, frozenset(heads))
        self._bytes += len(envelope.sealed)
        if len(own) > OF_ONE:
            self._remove(next(iter(own)))
        while len(self._kept) > IN_ALL or self._bytes > BYTES:
            most = max(self._of.values(), key=len)
            self._remove(next(iter(most)))

    def take(self, here: Collection[bytes]) -> list[Envelope]:
        """Remove and return the groups whose heads are all here, in order of arrival."""
        self._expire()
        taken = [envelope for _, envelope, heads in self._kept.values() if heads <= {*here}]
        for envelope in taken:
            self._remove(envelope.id)
        return taken

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and now - next(iter(self._kept.values()))[0] > SECONDS:
            self._remove(next(iter(self._kept)))

    def _remove(self, group: bytes) -> None:
        _, envelope, _ = self._kept.pop(group)
        self._bytes -= len(envelope.sealed)
        own = self._of[envelope.signer]
        del own[group]
        if not own:
            del self._of[envelope.signer]
