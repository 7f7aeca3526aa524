"""How long the leader may still be taken for alive. Knows no network: somebody else hears the heartbeats.

What counts is when a heartbeat arrives here, by a clock that never goes back; the sender's own time only tells a heartbeat
that was heard before from a new one. Whoever has just begun to listen cannot know that the leader is silent.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocol import Follower, Heartbeat, Opened


class Lease:
    """The lease of whoever leads the current term, as this node sees it."""

    def __init__(self, follower: Callable[[], Follower], seconds: float) -> None:
        self._follower = follower
        self._seconds = seconds
        self._listening: float | None = None
        """Since when heartbeats would have been heard."""
        self._term = 0
        """The term that the following are about."""
        self._entered = 0.0
        self._heard: float | None = None
        self._time_ms = -1
        self._news = trio.Event()

    def begin(self) -> None:
        """From now on heartbeats are heard; before, they may not have been."""
        self._now()
        self._listening = trio.current_time()

    def take(self, beat: Opened[Heartbeat]) -> bool:
        """Hear a heartbeat whose seal was checked. Whether it counts: the current leader's, and none that was heard before."""
        follower, told = self._now(), beat.message
        is_leaders = told.term == follower.term and beat.signer == follower.leader and not follower.holding
        if not is_leaders or told.time_ms <= self._time_ms:
            return False
        self._time_ms, self._heard = told.time_ms, trio.current_time()
        self._news.set()
        self._news = trio.Event()
        return True

    def is_new(self, beat: Heartbeat) -> bool:
        """Whether it is later than all that were heard of its term."""
        return self._now().term != beat.term or beat.time_ms > self._time_ms

    @property
    def is_fresh(self) -> bool:
        """Whether the leader was heard within the lease: without that, work may be for a chain that nobody follows."""
        return self.fresh_seconds > 0

    @property
    def fresh_seconds(self) -> float:
        """How long what was heard stays fresh."""
        self._now()
        return 0.0 if self._heard is None else self._left(self._heard)

    @property
    def is_over(self) -> bool:
        """Whether the leader has been silent for a whole lease, all of which this node has listened."""
        return self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Until the lease is over, unless a heartbeat comes."""
        self._now()
        if self._listening is None:
            return self._seconds
        return self._left(max(self._listening, self._entered, self._heard or 0.0))

    async def wait_until_fresh(self) -> None:
        """Return once the leader was heard."""
        while not self.is_fresh:
            await self._news.wait()

    async def wait_until_stale(self) -> None:
        """Return once the leader was not heard for a whole lease."""
        while (left := self.fresh_seconds) > 0:  # noqa: ASYNC110 - it is the clock
            await trio.sleep(left)

    async def wait_until_over(self) -> None:
        while (left := self.seconds_left) > 0:  # noqa: ASYNC110 - it is the clock
            await trio.sleep(left)

    def _left(self, since: float) -> float:
        return max(0.0, since + self._seconds - trio.current_time())

    def _now(self) -> Follower:
        """The chain as it is. A new term begins with a whole lease."""
        follower = self._follower()
        if follower.term != self._term:
            self._term, self._entered = follower.term, trio.current_time()
            self._heard, self._time_ms = None, -1
        return follower
