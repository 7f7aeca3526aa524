"""Send and receive the leader's heartbeats.

A heartbeat that names an unknown term or head makes the node ask for it. What silence means is up
to `Lease`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from echo_node.election.clock_skew import APART_SECONDS, ClockSkew
from echo_node.election.heartbeat_times import HeartbeatTimes
from echo_node.election.lease import Lease
from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, IGNORE, Message, Network, Reject, Validation
from echo_node.weights.chain_follower import ChainFollower
from protocol import ZERO, Envelope, Follower, Heartbeat, Identity, Opened, open_sealed, seal, topics

log = logging.getLogger(__name__)
WAITING: Final = 16
"""Heartbeats queued for reading; an older one adds nothing to a newer one."""


class HeartbeatSender:
    """Sends heartbeats while this node leads. `ext` returns further entries for each.

    Their times rise over restarts too, by `times`, since followers count nothing else.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        follower: Callable[[], Follower],
        lease: Lease,
        *,
        seconds: float,
        times: HeartbeatTimes | None = None,
        ext: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._network = network
        self._identity = identity
        self._follower = follower
        self._lease = lease
        self._seconds = seconds
        self._times = times or HeartbeatTimes()
        self._ext = ext
        self._last_ms = 0

    async def beat(self) -> None:
        """Send heartbeats until cancelled, or until another node leads."""
        while (follower := self._follower()).leader == self._identity.public:
            run = follower.rules.run
            sealed = seal(self._message(follower), self._identity, run)
            self._lease.renew(open_sealed(sealed, Heartbeat, run))  # its own is heard by nobody else here
            try:
                await self._network.publish(topics.topic(run, topics.HEARTBEATS), sealed)
            except PeerError as error:
                log.warning("a heartbeat could not be sent: %s", error)
            await trio.sleep(self._seconds)

    def _message(self, follower: Follower) -> Heartbeat:
        tip = follower.tip
        self._last_ms = self._next_time(follower.term)
        self._times.heard(follower.term, self._last_ms)
        return Heartbeat(
            head=tip.id if tip else ZERO,
            term=follower.term,
            time_ms=self._last_ms,
            version=tip.message.version if tip else 0,
            ext=self._ext(),
        )

    def _next_time(self, term: int) -> int:
        """Return the clock's time in milliseconds, or a later one if that was sent before.

        Times far ahead of the clock were sent while it was wrong, and counted nowhere.
        """
        now = time.time_ns() // 1_000_000
        sent = (self._last_ms, self._times.highest(term))
        return max([now, *(last + 1 for last in sent if last - now <= 1000 * APART_SECONDS)])


class HeartbeatMonitor:
    """Receives the run's heartbeats. `on_heartbeat` is called with each that counts."""

    def __init__(
        self,
        network: Network,
        chain: ChainFollower,
        lease: Lease,
        *,
        on_heartbeat: Callable[[Opened[Heartbeat]], None] = lambda _beat: None,
    ) -> None:
        self._network = network
        self._chain = chain
        self._lease = lease
        self._on_heartbeat = on_heartbeat
        self.clocks = ClockSkew()
        self._missed: bytes | None = None
        """Peers that named something unknown to this node."""
        self._wake = trio.Event()

    async def follow(self) -> None:
        """Receive heartbeats until cancelled."""
        run = self._chain.follower.rules.run
        topic = topics.topic(run, topics.HEARTBEATS)
        async with (
            self._network.subscribe(topic, self.judge, capacity=WAITING) as beats,
            trio.open_nursery() as nursery,
        ):
            self._lease.begin()
            nursery.start_soon(self._catch_up)
            async for message in beats:
                self.hear(open_sealed(message.data, Heartbeat, run), message.sender)

    def judge(self, message: Message) -> Validation:
        """Validate a heartbeat: cheap checks, then the signature.

        An old one, one of another term, or one far from the clock is not relayed, and nobody is
        blamed. While the leader is not heard, one far from the clock tells of a wrong clock.
        """
        follower = self._chain.follower
        envelope = Envelope.parse(message.data)
        if envelope.signer not in follower.rules.trainers:
            return Reject("not-trainer")
        beat = envelope.claim(Heartbeat, follower.rules.run)
        if beat.term < follower.term or not self._lease.is_new(beat):
            return IGNORE
        if beat.term == follower.term and envelope.signer != follower.leader:
            return IGNORE
        is_far = not self._lease.is_near(beat)
        if is_far and self._lease.is_fresh:  # the clock is right, so it is a recording
            return IGNORE
        opened = envelope.open(Heartbeat, follower.rules.run)
        if is_far:
            self._compare_clocks(opened)
            return IGNORE
        return ACCEPT

    def hear(self, beat: Opened[Heartbeat], sender: bytes) -> None:
        """Take a heartbeat, and ask for what it names if that is unknown here."""
        follower = self._chain.follower
        counts = self._lease.take(beat)
        self._compare_clocks(beat)
        if counts:
            self._on_heartbeat(beat)
        knows_more = beat.message.head != ZERO and self._chain.find(beat.message.head) is None
        if beat.message.term > follower.term or (counts and knows_more):
            self._missed = sender
            self._wake.set()

    def _compare_clocks(self, beat: Opened[Heartbeat]) -> None:
        """Compare this clock with the leader's; the beat itself is not taken."""
        if self._lease.is_leaders(beat):
            self.clocks.hear(beat.message.time_ms)

    async def _catch_up(self) -> None:
        """Ask for what was missed, while further heartbeats are read."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if (sender := self._missed) is not None:
                await self._chain.ask_around([sender])
