"""Peer exchange on the stream `/echo/peers/1`: server, client and schedule.

The server names connected peers that can be dialled, and never an address that means something else
to the client than to this node. What a peer names is unverified until it is connected.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import RequestError
from echo_node.net.discovery.address_scope import Scope, usable
from echo_node.net.discovery.dial_queue import DialQueue, Source
from echo_node.net.request_response import RequestResponse
from protocol import PeerPlace, PeersAnswer, PeersQuestion, ProtocolError, decode, encode, limits, peer_id
from protocol.topics import PEERS_STREAM

REQUEST_SECONDS: Final = 10.0
ANSWER_EVERY: Final = 1.0
"""Seconds between two responses to one peer; more frequent requests are refused."""


class PeerExchangeError(PeerError):
    """A peer exchange that failed or was refused."""


class PeerExchange:
    """Server and client of peer exchange."""

    def __init__(
        self,
        me: bytes,
        requests: RequestResponse,
        dialable: Callable[[], Mapping[bytes, Sequence[str]]],
        scope: Callable[[bytes], Scope],
    ) -> None:
        """Create the exchange.

        `scope` gives the scope that an address must have to mean the same here and at a peer.
        """
        self._me = me
        self._requests = requests
        self._dialable = dialable
        self._scope = scope
        self._answered: dict[bytes, float] = {}
        self._luck = random.SystemRandom()

    async def respond(self, client: bytes, request: bytes) -> bytes:
        """Return a random choice of connected peers. The `Handler` of the stream."""
        await trio.lowlevel.checkpoint()
        wanted = decode(PeersQuestion, request).wanted
        now = trio.current_time()
        self._answered = {peer: when for peer, when in self._answered.items() if now - when < ANSWER_EVERY}
        if client in self._answered:
            raise PeerExchangeError(f"one request every {ANSWER_EVERY:g} s is allowed")
        self._answered[client] = now
        least = self._scope(client)
        places = [
            PeerPlace(public, tuple(ways))
            for public, addresses in self._dialable().items()
            if public not in {client, self._me}
            and (ways := usable(addresses, public, least=least, most=limits.PEER_ADDRESSES))
        ]
        chosen = self._luck.sample(places, min(wanted, len(places)))
        return encode(PeersAnswer(tuple(sorted(chosen, key=lambda place: place.key))))

    async def request(self, peer: bytes, wanted: int, least: Scope) -> list[PeerPlace]:
        """Return at most `wanted` peers that a connected peer names, without this node.

        Only addresses of at least the scope `least` are kept.
        """
        request = encode(PeersQuestion(wanted))
        try:
            with trio.fail_after(REQUEST_SECONDS):
                response = await self._requests.request(
                    peer, PEERS_STREAM, request, limits.PEERS_ANSWER_BYTES
                )
            places = decode(PeersAnswer, response).peers
        except trio.TooSlowError:
            raise PeerExchangeError(f"no response within {REQUEST_SECONDS:g} s") from None
        except (RequestError, ProtocolError) as error:
            raise PeerExchangeError(str(error)) from error
        return [
            PeerPlace(place.key, tuple(ways))
            for place in places[:wanted]
            if place.key != self._me
            and (ways := usable(place.addresses, place.key, least=least, most=limits.PEER_ADDRESSES))
        ]


CONCURRENT_REQUESTS: Final = 4
FIRST_PAUSE: Final = 1.5
LONGEST_PAUSE: Final = 60.0
"""Seconds between two requests to one peer: after new peers, and at most."""
LOOK_SECONDS: Final = 0.25
_log = logging.getLogger("echo_node.net.discovery.peer_exchange")


@dataclass(slots=True)
class Referrer:
    """Results of the requests to one peer."""

    due: float = 0.0
    pause: float = FIRST_PAUSE
    named: int = 0
    dead: int = 0
    is_silent: bool = False

    @property
    def is_useless(self) -> bool:
        """Return whether it does not respond, or no peer that it named could be dialled."""
        return self.is_silent or (self.named > 0 and self.dead >= self.named)


class PeerExchangeSchedule:
    """Schedule of the questions for peers."""

    def __init__(
        self,
        exchange: PeerExchange,
        queue: DialQueue,
        admit: Callable[[bytes, bytes, Sequence[str]], Sequence[str]],
    ) -> None:
        """Create the schedule.

        `admit` takes a teller, a peer and its addresses; it returns those that the teller may name.
        """
        self._exchange = exchange
        self._queue = queue
        self._admit = admit
        self._referrers: dict[bytes, Referrer] = {}
        self._luck = random.SystemRandom()

    def count_dead(self, referrer: bytes | None) -> None:
        """Count a named peer that could not be dialled against its referrer."""
        if referrer in self._referrers:
            self._referrers[referrer].dead += 1

    def forget(self, peer: bytes) -> None:
        self._referrers.pop(peer, None)

    def order(self, peers: Collection[bytes], now: float) -> list[bytes]:
        """Return the peers to ask now, useful ones first."""
        for peer in peers:
            self._referrers.setdefault(peer, Referrer())
        due = [peer for peer in peers if self._referrers[peer].due <= now]
        useful = [peer for peer in due if not self._referrers[peer].is_useless]
        self._luck.shuffle(due)
        return useful or due

    async def run(
        self,
        peers: Callable[[], Collection[bytes]],
        scope: Callable[[bytes], Scope],
        changed: Callable[[], None],
    ) -> None:
        """Ask the peers that `peers` gives until cancelled; none while there are enough."""
        limit = trio.CapacityLimiter(CONCURRENT_REQUESTS)

        async def ask(peer: bytes) -> None:
            async with limit:
                if await self._ask(peer, peers(), scope(peer)):
                    changed()

        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                for peer in self.order(peers(), now)[: int(limit.available_tokens)]:
                    self._referrers[peer].due = now + LONGEST_PAUSE
                    nursery.start_soon(ask, peer)
                await trio.sleep(LOOK_SECONDS)

    async def _ask(self, peer: bytes, connected: Collection[bytes], least: Scope) -> int:
        try:
            places = await self._exchange.request(peer, limits.PEERS, least)
        except PeerExchangeError as error:
            _log.debug("peer exchange with %s failed: %s", peer_id(peer), error)
            places, silent = [], True
        else:
            silent = False
        new = sum(
            self._queue.add(
                place.key, self._admit(peer, place.key, place.addresses), Source.REFERRED, referrer=peer
            )
            for place in places
            if place.key not in connected and place.key not in self._queue
        )
        if (referrer := self._referrers.get(peer)) is not None:
            referrer.is_silent = silent
            referrer.named += new
            referrer.pause = FIRST_PAUSE if new else min(LONGEST_PAUSE, 2 * referrer.pause)
            referrer.due = trio.current_time() + referrer.pause * (0.75 + self._luck.random() / 2)
        return new
