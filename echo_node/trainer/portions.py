"""How many groups a sampler is asked for at once: as many as it fills before the deadline of a question, as far as is known.

Who misses the deadline is asked for half as much the next time, down to one group; who answers, for as much as its speed then
allows. It knows samplers by their keys only.
"""

from __future__ import annotations

from typing import Final

from protocol import limits

ROOM: Final = 0.5
"""Of the deadline, what a larger question may be expected to take."""


class Portions:
    """The largest question for each sampler that was ever too slow; for the others there is no bound but the wire's."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._most: dict[bytes, int] = {}

    def most(self, sampler: bytes) -> int:
        return self._most.get(sampler, limits.BATCH)

    def missed(self, sampler: bytes, groups: int) -> None:
        """So many groups were not filled before the deadline."""
        self._most[sampler] = max(1, groups // 2)

    def filled(self, sampler: bytes, groups: int, seconds: float) -> None:
        """So many were, in so long."""
        fits = int(ROOM * self._deadline * groups / max(seconds, 1e-3))
        if sampler in self._most and fits > self._most[sampler]:
            self._most[sampler] = min(fits, limits.BATCH)
