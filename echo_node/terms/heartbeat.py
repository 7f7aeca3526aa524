"""The leader's heartbeats, out and in. A heartbeat that names what this node has missed makes it ask.

It decides nothing: the lease says what a silence means.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, IGNORE, Message, Network, Reject, Validation
from echo_node.terms.clocks import Clocks
from echo_node.terms.lease import Lease
from echo_node.weights.hearing import Hearing
from protocol import ZERO, Envelope, Follower, Heartbeat, Identity, Opened, open_sealed, seal, topics

log = logging.getLogger(__name__)
WAITING: Final = 16
"""Heartbeats that wait to be read; an older one says nothing that a newer one does not."""


class Heart:
    """A leader's, which beats as long as it leads. `ext` is what else goes out with each beat."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        follower: Callable[[], Follower],
        lease: Lease,
        *,
        seconds: float,
        ext: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._network = network
        self._identity = identity
        self._follower = follower
        self._lease = lease
        self._seconds = seconds
        self._ext = ext
        self._last_ms = 0

    async def beat(self) -> None:
        """Beat until cancelled, or until another leads."""
        while (follower := self._follower()).leader == self._identity.public:
            run = follower.rules.run
            sealed = seal(self._told(follower), self._identity, run)
            self._lease.take(
                open_sealed(sealed, Heartbeat, run)
            )  # one's own is heard first, and by nobody else here
            try:
                await self._network.publish(topics.topic(run, topics.HEARTBEATS), sealed)
            except PeerError as error:
                log.warning("a heartbeat could not be sent: %s", error)
            await trio.sleep(self._seconds)

    def _told(self, follower: Follower) -> Heartbeat:
        tip = follower.tip
        self._last_ms = max(time.time_ns() // 1_000_000, self._last_ms + 1)
        return Heartbeat(
            head=tip.id if tip else ZERO,
            term=follower.term,
            time_ms=self._last_ms,
            version=tip.message.version if tip else 0,
            ext=self._ext(),
        )


class Pulse:
    """Hears the heartbeats of the run, for one node. `told` gets each that counts."""

    def __init__(
        self,
        network: Network,
        hearing: Hearing,
        lease: Lease,
        *,
        told: Callable[[Opened[Heartbeat]], None] = lambda _beat: None,
    ) -> None:
        self._network = network
        self._hearing = hearing
        self._lease = lease
        self._told = told
        self.clocks = Clocks()
        self._missed: bytes | None = None
        """Who has told of something that is not known here."""
        self._wake = trio.Event()

    async def follow(self) -> None:
        """Hear until cancelled."""
        run = self._hearing.follower.rules.run
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
        """Cheap checks, and the signature. What is old or of another's term is nobody's fault, and goes no further."""
        follower = self._hearing.follower
        envelope = Envelope.parse(message.data)
        if envelope.signer not in follower.rules.trainers:
            return Reject("not-trainer")
        beat = envelope.claim(Heartbeat, follower.rules.run)
        if beat.term < follower.term or not self._lease.is_new(beat):
            return IGNORE
        if beat.term == follower.term and envelope.signer != follower.leader:
            return IGNORE
        envelope.open(Heartbeat, follower.rules.run)
        return ACCEPT

    def hear(self, beat: Opened[Heartbeat], sender: bytes) -> None:
        """Take a heartbeat; if it names a term or a head that is not known here, ask for what was missed."""
        follower = self._hearing.follower
        counts = self._lease.take(beat)
        if counts:
            self.clocks.hear(beat.message.time_ms)
            self._told(beat)
        knows_more = beat.message.head != ZERO and self._hearing.find(beat.message.head) is None
        if beat.message.term > follower.term or (counts and knows_more):
            self._missed = sender
            self._wake.set()

    async def _catch_up(self) -> None:
        """Ask, while heartbeats go on being heard."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if (sender := self._missed) is not None:
                await self._hearing.ask_around([sender])
