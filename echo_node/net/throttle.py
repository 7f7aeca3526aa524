"""How many bytes a second may pass. A bucket that fills at a rate, and those who wait for it in line.

What is taken by somebody who then gives up flows back, so nobody can use up a limit by asking. It knows nothing of
what the bytes are, nor who sends them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import trio

from echo_node.errors import ConfigError
from protocol import limits

BURST_SECONDS: Final = 0.25
"""What may pass at once after a pause, in seconds of the rate: enough to hide the clock, too little to matter."""
PEERS: Final = 1_024


class Throttle:
    """At most `rate` bytes a second in the long run; without a rate, everything passes."""

    def __init__(self, rate: float | None = None, burst_bytes: int = 0) -> None:
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(
                f"a limit of {rate} bytes a second", advice="give a positive number, or none at all"
            )
        self.rate = rate
        self._burst = max(BURST_SECONDS, burst_bytes / rate) if rate else 0.0
        self._paid_until = -math.inf
        self._line = trio.Lock()  # trio's locks are first come, first served

    async def take(self, count: int) -> None:
        """Wait until so many more bytes may pass."""
        if self.rate is None:
            await trio.lowlevel.checkpoint()
            return
        async with self._line:
            before = self._paid_until
            start = max(before, trio.current_time() - self._burst)
            self._paid_until = start + count / self.rate
            try:
                await trio.sleep_until(self._paid_until)
            except trio.Cancelled:
                self._paid_until = before
                raise


class Uplink:
    """A limit for all peers together, and one for each of them."""

    def __init__(self, total: float | None = None, each: float | None = None) -> None:
        self._total = Throttle(
            total, limits.READ_BYTES
        )  # who has waited for its own limit seldom waits again
        self._rate = each
        self._each: OrderedDict[bytes, Throttle] = OrderedDict()
        self.limited = total is not None or each is not None
        """Whether anything here ever waits."""

    async def take(self, peer: bytes, count: int) -> None:
        """Wait until so many bytes may go to a peer."""
        if self._rate is not None:
            own = self._each.setdefault(peer, Throttle(self._rate))
            self._each.move_to_end(peer)
            while len(self._each) > PEERS:
                self._each.popitem(last=False)
            await own.take(count)
        await self._total.take(count)
