"""Who sends groups that are of no use, again and again: what each peer may waste of our time before it is not looked at.

A bucket for each peer, which fills with time. It counts against whoever handed a group over, who is its sampler or somebody
who chose to pass it on: nobody can waste another's. It knows nothing of groups.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

PATIENCE: Final = 256.0
"""Useless groups of one peer, at once."""
PER_SECOND: Final = 4.0
"""By which patience comes back."""
PEERS: Final = 1024
"""That are remembered; those that have wasted nothing for longest are forgotten first."""
OWN_FAULT: Final = frozenset({"malformed", "over-limit", "wrong-engine", "wrong-prompt", "wrong-signature"})
"""Reasons for a refusal that an honest sampler does not give. Others happen to the best, and count for little."""
LITTLE: Final = 1 / 8


class Waste:
    """What peers have wasted, by their keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wasted: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """How much, and as of when."""

    def add(self, peer: bytes, reason: str, count: int = 1) -> None:
        """So many groups that this peer handed over were refused."""
        cost = count if reason in OWN_FAULT else LITTLE * count
        self._wasted[peer] = (self._now(peer) + cost, self._clock())
        self._wasted.move_to_end(peer)
        while len(self._wasted) > PEERS:
            self._wasted.popitem(last=False)

    def is_spent(self, peer: bytes) -> bool:
        """Whether patience with this peer is used up for now."""
        return peer in self._wasted and self._now(peer) >= PATIENCE

    def _now(self, peer: bytes) -> float:
        wasted, at = self._wasted.get(peer, (0.0, 0.0))
        return max(0.0, wasted - PER_SECOND * (self._clock() - at))
