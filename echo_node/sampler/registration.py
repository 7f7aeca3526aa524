"""Registration of a sampler and its engine class in the leader's roster.

The join is delivered to the leader directly, since gossip may lose it. An earlier start may have
joined with another engine class, and a new leader may only know that one: groups drawn before the
roster names the current class would be refused.
"""

from __future__ import annotations

import logging
import random
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, PeerEvent, RequestError
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.net.subscription import Subscription
from echo_node.weights.puller import Puller
from protocol import ZERO, Identity, Join, Opened, ProtocolError, WeightsHead, seal, topics

log = logging.getLogger(__name__)
JOIN_SECONDS: Final = 10.0
"""Seconds for one delivery of a join."""
SETTLE_SECONDS: Final = 0.5
"""Longest random delay, in seconds, before a peer that just connected is contacted."""
JOIN_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts to deliver a join; the last one repeats."""


class Registration:
    """One sampler's membership in the rosters of a run."""

    def __init__(
        self,
        run: bytes,
        network: Network,
        identity: Identity,
        puller: Puller,
        *,
        engine: str,
        agent: str,
        luck: random.Random,
    ) -> None:
        self._run = run
        self._network = network
        self._identity = identity
        self._puller = puller
        self._chain = puller.chain
        self._engine = engine
        self._agent = agent
        self._luck = luck
        self._joined = trio.Event()
        self._doubted = trio.Event()
        self.turned_away: str | None = None
        """The leader's reason for refusing this sampler, if it did."""

    @property
    def is_joined(self) -> bool:
        return self._joined.is_set()

    async def wait(self) -> None:
        """Wait until a roster lists this sampler with its engine class."""
        await self._joined.wait()

    def doubt(self) -> None:
        """Check the roster again before sampling: it may name another engine class by now."""
        if self.is_joined:
            self._joined = trio.Event()
            self._doubted.set()

    async def keep(self) -> None:
        """Deliver joins until a head's roster lists this sampler; repeat after `doubt`."""
        await self._deliver()
        await self._chain.ask_around()
        while True:
            self._doubted = trio.Event()
            await self._be_listed()
            await self._doubted.wait()

    async def is_listed(self, head: Opened[WeightsHead]) -> bool:
        """Return whether the roster of a head lists this sampler with its engine class."""
        member = (await self._puller.roster(head)).find(self._identity.public)
        return member is not None and member.engine == self._engine

    async def _be_listed(self) -> None:
        head: Opened[WeightsHead] | None = None
        while not self.is_joined:
            head = await self._chain.wait_for_newer(head.id if head else None)
            try:
                listed = await self.is_listed(head)
            except (PeerError, ProtocolError) as error:
                log.info("roster of version %d not fetched: %s", head.message.version, error)
                continue
            if listed:
                self._joined.set()
            else:
                await self._deliver()

    async def _deliver(self) -> None:
        tip = self._chain.tip
        join = Join(agent=self._agent, engine=self._engine, head=tip.id if tip else ZERO, name="")
        sealed = seal(join, self._identity, self._run)
        async with self._network.watch() as events:
            failures = 0
            while True:
                try:
                    await deliver(
                        self._network,
                        self._chain.leader,
                        topics.topic(self._run, topics.JOINS),
                        sealed,
                        deadline=JOIN_SECONDS,
                        most=0,
                    )
                except PeerError as error:
                    pause = JOIN_PAUSES[min(failures, len(JOIN_PAUSES) - 1)]
                    failures += 1
                    self._log_failure(error, pause)
                    with trio.move_on_after(pause * (0.75 + 0.5 * self._luck.random())):
                        await self._wait_for_leader(events)
                        failures = 0  # it may take some more seconds until it serves
                else:
                    self.turned_away = None
                    return

    def _log_failure(self, error: PeerError, pause: float) -> None:
        if not isinstance(error, RequestError) or error.reason != "refused":
            log.info("leader not reached, next try in %.1f s: %s", pause, error)
        elif self.turned_away is None:
            self.turned_away = error.what
            log.warning("the leader refuses this sampler: %s", error)

    async def _wait_for_leader(self, events: Subscription[PeerEvent]) -> None:
        """Wait until the leader connects; the caller sets the deadline."""
        async for event in events:
            if event.joined and event.public == self._chain.leader:
                await trio.sleep(self._luck.random() * SETTLE_SECONDS)  # it may serve nothing yet
                return
