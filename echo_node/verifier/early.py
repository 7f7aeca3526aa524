"""Groups that come before the head under which they were drawn is here: kept for a while, and looked at when it is.

A sampler that pulls faster is no liar, and where nothing is used without a quorum's word, a step would wait for groups that
were dropped. How many are kept is bounded, in all and of each sampler. It knows no network; what is kept is still unchecked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from protocol import Envelope

SECONDS: Final = 60.0
"""For as long as a trainer waits for a word on a group."""
OF_ONE: Final = 64
"""Groups of one sampler: slots are filled one after the other, and no more may be missing between them."""
IN_ALL: Final = 1_024
BYTES: Final = 32 << 20


class Early:
    """What one verifier keeps, by sampler and in the order of arrival. The oldest of whoever has most gives way first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[float, Envelope, frozenset[bytes]]] = OrderedDict()
        """When it came, and under which heads it was drawn."""
        self._of: dict[bytes, OrderedDict[bytes, None]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, envelope: Envelope, heads: Iterable[bytes]) -> None:
        """Keep a group that was drawn under these heads; again, and it is the same."""
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
        """Those whose heads are all here, in the order in which they came. They are kept no longer."""
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
