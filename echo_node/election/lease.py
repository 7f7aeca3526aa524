"""Lease of the leader: for how long it counts as alive.

What counts is when a heartbeat arrives here, by a monotonic clock. The sender's time tells a
replayed heartbeat from a new one: it must be higher than all of its term, also of those before a
restart (`heartbeat_times`), and near this machine's clock. A node that has just begun to listen
cannot know that the leader is silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from echo_node.election.clock_skew import APART_SECONDS
from echo_node.election.heartbeat_times import HeartbeatTimes
from protocol import Follower, Heartbeat, Opened


class Lease:
    """Lease of the current term's leader, as this node sees it.

    `times` are the highest times heard before; `clock` returns this machine's time in seconds.
    """

    def __init__(
        self,
        follower: Callable[[], Follower],
        seconds: float,
        *,
        times: HeartbeatTimes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._follower = follower
        self._seconds = seconds
        self._times = times or HeartbeatTimes()
        self._clock = clock
        self._listening: float | None = None
        """Time since which heartbeats would have been received."""
        self._term = 0
        """Term that the following attributes belong to."""
        self._entered = 0.0
        self._heard: float | None = None
        self._news = trio.Event()

    def begin(self) -> None:
        """Note that heartbeats are received from now on."""
        self._now()
        self._listening = trio.current_time()

    def take(self, beat: Opened[Heartbeat]) -> bool:
        """Take a heartbeat whose seal was checked; return whether it counts.

        It counts if it is the current leader's, later than all before, and near the clock.
        """
        message = beat.message
        if not self.is_leaders(beat) or not self.is_new(message) or not self.is_near(message):
            return False
        self._times.heard(message.term, message.time_ms)
        self._renew()
        return True

    def renew(self, own: Opened[Heartbeat]) -> None:
        """Take a heartbeat that this node sends as the leader, whatever its time."""
        if self.is_leaders(own):
            self._renew()

    def is_leaders(self, beat: Opened[Heartbeat]) -> bool:
        """Return whether a heartbeat is signed by the leader of the current term."""
        follower = self._now()
        return beat.message.term == follower.term and beat.signer == follower.leader and not follower.holding

    def is_new(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat is later than all others of its term."""
        return beat.time_ms > self._times.highest(beat.term)

    def is_near(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat's time is near this machine's clock.

        A recording is older; a time far ahead would make all that follow it count as repeated.
        """
        return abs(self._clock() - beat.time_ms / 1000) <= APART_SECONDS

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

    def _renew(self) -> None:
        self._heard = trio.current_time()
        self._news.set()
        self._news = trio.Event()

    def _left(self, since: float) -> float:
        return max(0.0, since + self._seconds - trio.current_time())

    def _now(self) -> Follower:
        """Return the current chain. A new term begins with a whole lease."""
        follower = self._follower()
        if follower.term != self._term:
            self._term, self._entered = follower.term, trio.current_time()
            self._heard = None
        return follower
