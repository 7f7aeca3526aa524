"""How fast one peer is served: a bucket of things that fills at a rate. Whoever empties it waits, or is told to come later."""

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
        self._fill()
        self._left -= cost
        await trio.sleep(max(0.0, -self._left / self._rate))

    def spend(self, cost: float = 1.0) -> bool:
        """Take `cost` things out, if there is anything left, and perhaps owe some of it; else take nothing."""
        self._fill()
        if self._left <= 0:
            return False
        self._left -= cost
        return True

    def _fill(self) -> None:
        now = trio.current_time()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
