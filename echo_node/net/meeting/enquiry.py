"""Asking around: whom to ask for peers, how often, and what became of what each told.

Whoever tells only of the dead, or nothing, is asked last; nobody is asked often. It dials nobody: what is told goes to
the candidates.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.net.meeting.candidates import Candidates, Source
from echo_node.net.meeting.exchange import Exchange, HearsayError
from echo_node.net.meeting.places import Scope
from protocol import limits, peer_id

ASKS: Final = 4
"""Peers that are asked at once."""
FIRST_PAUSE: Final = 1.5
LONGEST_PAUSE: Final = 60.0
"""Seconds between two questions to one peer: after news, and when there was none for long."""
LOOK_SECONDS: Final = 0.25
_log = logging.getLogger("echo_node.net.meeting.enquiry")


@dataclass(slots=True)
class Teller:
    """What came of asking one peer."""

    due: float = 0.0
    pause: float = FIRST_PAUSE
    told: int = 0
    dead: int = 0
    is_silent: bool = False

    @property
    def is_useless(self) -> bool:
        """Whether it answers nothing, or all that it told is dead."""
        return self.is_silent or (self.told > 0 and self.dead >= self.told)


class Enquiry:
    """One node's questions about peers."""

    def __init__(self, exchange: Exchange, candidates: Candidates) -> None:
        self._exchange = exchange
        self._candidates = candidates
        self._tellers: dict[bytes, Teller] = {}
        self._luck = random.SystemRandom()

    def dead(self, teller: bytes | None) -> None:
        """Somebody of whom a peer told was given up."""
        if teller in self._tellers:
            self._tellers[teller].dead += 1

    def forget(self, peer: bytes) -> None:
        self._tellers.pop(peer, None)

    def order(self, peers: Collection[bytes], now: float) -> list[bytes]:
        """Whom to ask now, best first."""
        for peer in peers:
            self._tellers.setdefault(peer, Teller())
        due = [peer for peer in peers if self._tellers[peer].due <= now]
        useful = [peer for peer in due if not self._tellers[peer].is_useless]
        self._luck.shuffle(due)
        return useful or due

    async def run(
        self,
        peers: Callable[[], Collection[bytes]],
        least: Callable[[bytes], Scope],
        news: Callable[[], None],
    ) -> None:
        """Ask whom `peers` gives, which is nobody while there are enough, until cancelled."""
        limit = trio.CapacityLimiter(ASKS)

        async def ask(peer: bytes) -> None:
            async with limit:
                if await self._ask(peer, peers(), least(peer)):
                    news()

        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                for peer in self.order(peers(), now)[: int(limit.available_tokens)]:
                    self._tellers[peer].due = now + LONGEST_PAUSE
                    nursery.start_soon(ask, peer)
                await trio.sleep(LOOK_SECONDS)

    async def _ask(self, peer: bytes, connected: Collection[bytes], least: Scope) -> int:
        try:
            places = await self._exchange.ask(peer, limits.PEERS, least)
        except HearsayError as error:
            _log.debug("%s told nothing: %s", peer_id(peer), error)
            places, silent = [], True
        else:
            silent = False
        news = sum(
            self._candidates.add(place.key, place.addresses, Source.TOLD, teller=peer, least=least)
            for place in places
            if place.key not in connected and place.key not in self._candidates
        )
        if (teller := self._tellers.get(peer)) is not None:
            teller.is_silent = silent
            teller.told += news
            teller.pause = FIRST_PAUSE if news else min(LONGEST_PAUSE, 2 * teller.pause)
            teller.due = trio.current_time() + teller.pause * (0.75 + self._luck.random() / 2)
        return news
