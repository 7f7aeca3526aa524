"""The company that a node needs: it says under which keys of the DHT others find it, and keeps a way to several of those
that it looks for. A topic is forwarded only by those who subscribe to it, so a bare seed between two nodes is no way.

It works on any `Network`, and knows nothing of what the keys stand for.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, PeerEvent
from echo_node.net.inbox import Inbox

SEVERAL: Final = 4
"""Peers under one key that are enough: one may go without the others being missed."""
FIRST_SECONDS, LAST_SECONDS = 0.5, 30.0
"""Between two look-ups that found too few: first and, doubling, last."""
AGAIN_SECONDS: Final = 300.0
"""After a look-up that found enough: peers come and go."""
_log = logging.getLogger("echo_node.net.company")


class Company:
    """Whom this node is found by, and whom it keeps near. `luck` spreads the look-ups of many nodes."""

    def __init__(
        self,
        network: Network,
        *,
        announced: Sequence[bytes] = (),
        needed: Mapping[bytes, int],
        luck: random.Random | None = None,
    ) -> None:
        """`needed`: keys, and how many peers under each are wanted."""
        self._network = network
        self._announced = announced
        self._needed = needed
        self._luck = luck or random.SystemRandom()
        self._near: dict[bytes, frozenset[bytes]] = {}
        self._lost = {key: trio.Event() for key in needed}

    def near(self, key: bytes) -> frozenset[bytes]:
        """Those under a key that are connected now."""
        return self._near.get(key, frozenset()) & self._network.peers()

    async def keep(self) -> None:
        """Announce and look until cancelled, or until this node leaves the network (`PeerError`)."""
        async with self._network.watch() as events, trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, events)
            for key in self._announced:
                nursery.start_soon(self._announce, key)
            for key, count in self._needed.items():
                nursery.start_soon(self._look_for, key, count)

    async def _announce(self, key: bytes) -> None:
        await self._network.provide(key)

    async def _look_for(self, key: bytes, count: int) -> None:
        pause = FIRST_SECONDS
        while True:
            self._lost[key] = trio.Event()
            self._near[key] = frozenset(await self._network.find(key, count))
            found = len(self._near[key])
            _log.debug("%d of %d peers found under %s", found, count, key.hex())
            pause = FIRST_SECONDS if found else min(2 * pause, LAST_SECONDS)
            wait = AGAIN_SECONDS if found >= count else LAST_SECONDS if found else pause
            with trio.move_on_after(wait * self._luck.uniform(0.8, 1.2)):
                await self._lost[key].wait()
                await trio.sleep(FIRST_SECONDS)  # whoever was cut off together is missed together

    async def _watch(self, events: Inbox[PeerEvent]) -> None:
        """Look again at once when one of them went."""
        async for event in events:
            for key, peers in self._near.items():
                if not event.joined and event.public in peers:
                    self._lost[key].set()
        raise PeerError("this node has left the network")
