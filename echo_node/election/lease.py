"""Lease of the leader: for how long it counts as alive.

What counts is when a heartbeat arrives here, by a monotonic clock; the sender's time only tells a
repeated heartbeat from a new one. A node that has just begun to listen cannot know that the leader
is silent.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocol import Follower, Heartbeat, Opened


class Lease:
    """Lease of the current term's leader, as this node sees it."""

    def __init__(self, follower: Callable[[], Follower], seconds: float) -> None:
        self._follower = follower
        self._seconds = seconds
        self._listening: float | None = None
        """Time since which heartbeats would have been received."""
        self._term = 0
        """Term that the following attributes belong to."""
        self._entered = 0.0
        self._heard: float | None = None
        self._time_ms = -1
        self._news = trio.Event()

    def begin(self) -> None:
        """Note that heartbeats are received from now on."""
        self._now()
        self._listening = trio.current_time()

    def take(self, beat: Opened[Heartbeat]) -> bool:
        """Take a heartbeat whose seal was checked; return whether it counts.

        It counts if it is the current leader's and was not taken before.
        """
        follower, message = self._now(), beat.message
        is_leaders = message.term == follower.term and beat.signer == follower.leader and not follower.holding
        if not is_leaders or message.time_ms <= self._time_ms:
            return False
        self._time_ms, self._heard = message.time_ms, trio.current_time()
        self._news.set()
        self._news = trio.Event()
        return True

    def is_new(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat is later than all others of its term."""
        return self._now().term != beat.term or beat.time_ms > self._time_ms

    @property
    def is_fresh(self) -> bool:
        """Return whether the leader was heard within the lease.

        If not, work may be for a chain that nobody follows.
        """
        return self.fresh_seconds > 0

    @property
    def fresh_seconds(self) -> float:
        """Return the seconds for which the last heartbeat stays fresh."""
        self._now()
        return 0.0 if self._heard is None else self._left(self._heard)

    @property
    def is_over(self) -> bool:
        """Return whether the leader was silent for a whole lease while this node listened."""
        return self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the lease is over without another heartbeat."""
        self._now()
        if self._listening is None:
            return self._seconds
        return self._left(max(self._listening, self._entered, self._heard or 0.0))

    async def wait_until_fresh(self) -> None:
        """Wait until the leader is heard."""
        while not self.is_fresh:
            await self._news.wait()

    async def wait_until_stale(self) -> None:
        """Wait until the leader was silent for a whole lease."""
        while (left := self.fresh_seconds) > 0:  # noqa: ASYNC110 - it is the clock
            await trio.sleep(left)

    async def wait_until_over(self) -> None:
        while (left := self.seconds_left) > 0:  # noqa: ASYNC110 - it is the clock
            await trio.sleep(left)

    def _left(self, since: float) -> float:
        return max(0.0, since + self._seconds - trio.current_time())

    def _now(self) -> Follower:
        """Return the current chain. A new term begins with a whole lease."""
        follower = self._follower()
        if follower.term != self._term:
            self._term, self._entered = follower.term, trio.current_time()
            self._heard, self._time_ms = None, -1
        return follower
