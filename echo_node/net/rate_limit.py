"""Rate limits: a token bucket, and bandwidth limits built on it."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import trio

from echo_node.errors import ConfigError
from protocol import limits

BURST_SECONDS: Final = 0.25
"""Seconds of the rate that may pass at once after a pause, to hide the clock's granularity."""
PEERS: Final = 1_024
"""Peers with a bandwidth limit of their own; the least recently used is forgotten."""


class TokenBucket:
    """Token bucket: `rate` tokens a second in the long run, `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst_seconds = burst / rate
        self._empty_at = -math.inf  # the time at which the balance is zero; in the future, it is a debt

    def reserve(self, cost: float = 1.0) -> float:
        """Take tokens, on credit if need be, and return the time at which they are paid."""
        self._empty_at = max(self._empty_at, trio.current_time() - self._burst_seconds) + cost / self._rate
        return self._empty_at

    def refund(self, cost: float) -> None:
        """Return tokens that were reserved and not used."""
        self._empty_at -= cost / self._rate

    def has(self, cost: float = 1.0) -> bool:
        """Return whether all of the cost is in the bucket, up to rounding."""
        return trio.current_time() - self._empty_at >= 0.999 * cost / self._rate

    async def wait(self, cost: float = 1.0) -> None:
        """Take tokens and wait until they are paid; a cancelled wait still takes them."""
        await trio.sleep_until(self.reserve(cost))

    def spend(self, cost: float = 1.0) -> bool:
        """Take tokens if the balance is positive; return whether they were taken.

        The balance may fall below zero by it.
        """
        if self._empty_at >= trio.current_time():
            return False
        self.reserve(cost)
        return True


class Throttle:
    """Bandwidth limit of `rate` bytes a second, in order; unlimited without a rate.

    A taker that is cancelled gives back its share, so nobody uses up the limit by asking.
    """

    def __init__(self, rate: float | None = None, burst_bytes: int = 0) -> None:
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(
                f"a limit of {rate} bytes a second", advice="give a positive number, or none at all"
            )
        self.rate = rate
        self._bucket = TokenBucket(rate, max(BURST_SECONDS * rate, burst_bytes)) if rate else None
        self._queue = trio.Lock()  # trio's locks are first come, first served

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        if self._bucket is None:
            await trio.lowlevel.checkpoint()
            return
        async with self._queue:
            until = self._bucket.reserve(count)
            try:
                await trio.sleep_until(until)
            except trio.Cancelled:
                self._bucket.refund(count)
                raise


class UploadLimit:
    """Bandwidth limit for all peers together, and one for each of them."""

    def __init__(self, total: float | None = None, each: float | None = None) -> None:
        # the burst lets a peer that waited for its own limit seldom wait again for the total
        self._total = Throttle(total, limits.READ_BYTES)
        self._rate = each
        self._each: OrderedDict[bytes, Throttle] = OrderedDict()
        self.limited = total is not None or each is not None
        """Whether any transfer ever waits."""

    async def take(self, peer: bytes, count: int) -> None:
        """Wait until `count` bytes may go to a peer."""
        if self._rate is not None:
            own = self._each.setdefault(peer, Throttle(self._rate))
            self._each.move_to_end(peer)
            while len(self._each) > PEERS:
                self._each.popitem(last=False)
            await own.take(count)
        await self._total.take(count)
