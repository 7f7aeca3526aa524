"""Announce a node's role in the DHT, and stay connected to peers of other roles.

A topic is forwarded only by its subscribers, so a bootstrap node between two peers does not connect
them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, PeerEvent
from echo_node.net.subscription import Subscription

SEVERAL: Final = 4
"""Peers to stay connected to under one key: one may leave without harm."""
FIRST_SECONDS, LAST_SECONDS = 0.5, 30.0
"""Seconds between lookups that found too few: first and, doubling, last."""
AGAIN_SECONDS: Final = 300.0
"""Seconds after a lookup that found enough."""
_log = logging.getLogger("echo_node.net.discovery.role_peers")


class RolePeers:
    """DHT announcements of one node, and the providers that it stays connected to.

    `needed` maps DHT keys to the number of peers wanted under each; `luck` spreads the lookups of
    many nodes.
    """

    def __init__(
        self,
        network: Network,
        *,
        announced: Sequence[bytes] = (),
        needed: Mapping[bytes, int],
        luck: random.Random | None = None,
    ) -> None:
        self._network = network
        self._announced = announced
        self._needed = needed
        self._luck = luck or random.SystemRandom()
        self._found: dict[bytes, frozenset[bytes]] = {}
        self._lost = {key: trio.Event() for key in needed}

    def connected(self, key: bytes) -> frozenset[bytes]:
        """Return the connected peers under a key."""
        return self._found.get(key, frozenset()) & self._network.peers()

    async def run(self) -> None:
        """Announce and look up until cancelled, or until the network ends (`PeerError`)."""
        async with self._network.watch() as events, trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_losses, events)
            for key in self._announced:
                nursery.start_soon(self._announce, key)
            for key, count in self._needed.items():
                nursery.start_soon(self._look_up, key, count)

    async def _announce(self, key: bytes) -> None:
        await self._network.provide(key)

    async def _look_up(self, key: bytes, count: int) -> None:
        pause = FIRST_SECONDS
        while True:
            self._lost[key] = trio.Event()
            self._found[key] = frozenset(await self._network.find(key, count))
            found = len(self._found[key])
            _log.debug("%d of %d peers found under %s", found, count, key.hex())
            pause = FIRST_SECONDS if found else min(2 * pause, LAST_SECONDS)
            wait = AGAIN_SECONDS if found >= count else LAST_SECONDS if found else pause
            with trio.move_on_after(wait * self._luck.uniform(0.8, 1.2)):
                await self._lost[key].wait()
                await trio.sleep(FIRST_SECONDS)  # peers that were cut off together are looked up together

    async def _watch_losses(self, events: Subscription[PeerEvent]) -> None:
        """Look up again at once when a peer disconnects."""
        async for event in events:
            for key, peers in self._found.items():
                if not event.joined and event.public in peers:
                    self._lost[key].set()
        raise PeerError("this node has left the network")
