"""How fast one peer is served: a bucket of things that fills at a rate. Whoever empties it waits; nothing is dropped."""

from __future__ import annotations

import trio


class Pace:
    """`rate` things a second in the long run, `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = trio.current_time()

    async def wait(self, cost: float = 1.0) -> None:
        """Take `cost` things out, and wait until they would have been there."""
        now = trio.current_time()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - cost
        self._at = now
        await trio.sleep(max(0.0, -self._left / self._rate))
