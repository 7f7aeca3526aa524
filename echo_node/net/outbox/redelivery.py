"""At-least-once delivery: gossip, then direct requests until a receipt comes.

Every pending item of an outbox is gossiped; what no receipt names within a moment is delivered
directly to each recipient until one does, across restarts of either side. Receipts reach the
outbox by their reader, wherever they arrived.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, PeerEvent, RequestError
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.outbox import LONGEST, Outbox
from echo_node.net.outbox.recipient import ExtraSeconds, OnResponse, Pack, Recipient, packed
from echo_node.net.subscription import Subscription
from protocol import limits

log = logging.getLogger(__name__)
Recipients: TypeAlias = Callable[[], Sequence[bytes]]
"""Public keys of the peers that should get every item: at least those that give receipts."""


class Redelivery:
    """The sending side of delivery. `luck` draws the jitter of retries."""

    def __init__(
        self,
        network: Network,
        outbox: Outbox,
        *,
        recipients: Recipients,
        pack: Pack,
        on_response: OnResponse,
        patience: Patience | None = None,
        luck: random.Random | None = None,
        extra_seconds: ExtraSeconds = lambda _message: 0.0,
    ) -> None:
        self._extra_seconds = extra_seconds
        self._network = network
        self._outbox = outbox
        self._recipients = recipients
        self._pack = pack
        self._on_response = on_response
        self._patience = patience or Patience()
        self._luck = luck or random.SystemRandom()
        self._routes: dict[bytes, Recipient] = {}
        self._recipients_changed = trio.Event()

    async def run(self) -> None:
        """Gossip and deliver until cancelled, or until this node leaves (`PeerError`)."""
        async with self._network.watch() as events, trio.open_nursery() as nursery:
            nursery.start_soon(self._gossip)
            nursery.start_soon(self._feed)
            nursery.start_soon(self._watch, events)
            nursery.start_soon(self._keep_routes)

    def reroute(self) -> None:
        """Check the recipients again, as they may have changed."""
        self._recipients_changed.set()

    async def _gossip(self) -> None:
        """Publish each item once, batched, at most one message's worth at a time."""
        waiting: deque[bytes] = deque()
        mark = 0
        while True:
            if not waiting:
                await self._outbox.wait(mark)
            await trio.sleep(self._patience.gather)
            fresh, mark = self._outbox.since(mark)
            waiting.extend(fresh)
            for topic, message in packed(await self._outbox.read(self._next(waiting)), self._pack):
                try:
                    await self._network.publish(topic, message)
                except PeerError as error:
                    if isinstance(error, RequestError) and error.reason == "left":
                        raise
                    log.info("some items could not be gossiped, and go by hand: %s", error)

    def _next(self, waiting: deque[bytes]) -> list[bytes]:
        chosen: list[bytes] = []
        room = LONGEST
        while waiting and len(chosen) < limits.BATCH:
            room -= self._outbox.size(waiting[0]) + 5
            if room < 0 and chosen:
                break
            chosen.append(waiting.popleft())
        return chosen

    async def _feed(self) -> None:
        """Wake up the recipients' tasks when there are new items."""
        mark = 0
        while True:
            await self._outbox.wait(mark)
            _, mark = self._outbox.since(mark)
            for route in self._routes.values():
                route.wake()

    async def _watch(self, events: Subscription[PeerEvent]) -> None:
        async for event in events:
            if event.joined and event.public in self._routes:
                self._routes[event.public].retry_soon()

    async def _keep_routes(self) -> None:
        """Run one task for each recipient, so that none waits for another."""
        async with trio.open_nursery() as nursery:
            while True:
                self._recipients_changed = trio.Event()
                wanted = [peer for peer in dict.fromkeys(self._recipients()) if peer != self._network.public]
                for peer in set(self._routes) - set(wanted):
                    self._routes.pop(peer).scope.cancel()
                for peer in wanted:
                    if peer not in self._routes:
                        route = self._routes[peer] = self._route_to(peer)
                        nursery.start_soon(route.run)
                await self._recipients_changed.wait()

    def _route_to(self, peer: bytes) -> Recipient:
        return Recipient(
            peer,
            self._network,
            self._outbox,
            pack=self._pack,
            on_response=self._on_response,
            patience=self._patience,
            luck=self._luck,
            extra_seconds=self._extra_seconds,
        )
