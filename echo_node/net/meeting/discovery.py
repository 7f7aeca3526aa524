"""Keeps a node among peers: it dials whom the seeds, the book, the LAN and other peers name, until it has enough.

It closes no connection and drops nobody. Peers that were lost are looked for even when there are enough, so that two
halves of a swarm grow together again. It knows nothing of runs, of gossip or of what peers are for.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from echo_node.errors import PeerError, boundary
from echo_node.net.asking import Asking
from echo_node.net.host import HardHost, id_of, key_of
from echo_node.net.meeting.acquaintances import Acquaintances
from echo_node.net.meeting.candidates import Candidate, Candidates, Source
from echo_node.net.meeting.enquiry import Enquiry
from echo_node.net.meeting.exchange import Exchange
from echo_node.net.meeting.lan import Lan
from echo_node.net.meeting.peerbook import PeerBook
from echo_node.net.meeting.places import interfaces
from echo_node.net.meeting.seeds import Seed, SeedError, resolve
from protocol import limits, peer_id
from protocol.topics import PEERS_STREAM

WANTED: Final = 8
MOST: Final = 16
"""Peers up to which a node dials by itself; who comes to it comes on top."""
DIALS: Final = 8
"""Dials at once, while fewer than wanted are there; after that one at a time."""
DIAL_SECONDS: Final = 8.0
FROM_BOOK: Final = 128
BRIEF_SECONDS: Final = 5.0
"""A connection that ends sooner counts as a failure."""
SEED_PAUSE: Final = (1.0, 30.0)
"""The first and the longest pause before a name is resolved again."""
VISIT_SECONDS: Final = 600.0
"""How often a node that has enough peers looks for a seed that it is not connected to."""
TICK_SECONDS: Final = 0.5
MOVE_SECONDS: Final = 5.0
_STORE_SECONDS: Final = 3_600
_log = logging.getLogger("echo_node.net.meeting.discovery")


class DialError(PeerError):
    """A peer that could not be reached."""


class Discovery:
    """One node's search for peers."""

    def __init__(
        self,
        host: HardHost,
        *,
        seeds: Sequence[Seed] = (),
        book: PeerBook | None = None,
        lan: Lan | None = None,
        wanted: int = WANTED,
        most: int = MOST,
        asking: Asking | None = None,
    ) -> None:
        """Without a book it remembers in memory, without a `lan` it does not look there."""
        self._host = host
        me = key_of(host.get_id()) or b""
        self._seeds = seeds
        self._book = book if book is not None else PeerBook(None)
        self._lan = lan
        self._wanted = wanted
        self._most = max(most, wanted)
        self._asking = asking or Asking(host, Counter())
        self._candidates = Candidates(me, trio.current_time)
        self._acquainted = Acquaintances(host, self._book)
        self._exchange = Exchange(me, self._asking, self._acquainted.dialable, self._acquainted.nearest)
        self._enquiry = Enquiry(self._exchange, self._candidates)
        self._dialling: set[bytes] = set()
        self._changed = trio.Event()
        self._visit_at = 0.0
        self._luck = random.SystemRandom()
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Look for peers until cancelled."""
        for rank, entry in enumerate(self._book.best(FROM_BOOK)):
            self._candidates.add(entry.public, entry.addresses, Source.BOOK, rank=rank)
        serving = self._asking.serve(PEERS_STREAM, self._exchange.answer, most=limits.PEERS_QUESTION_BYTES)
        with serving, self._acquainted.watch(self._came, self._went):
            async with trio.open_nursery() as nursery:
                for seed in self._seeds:
                    nursery.start_soon(self._follow, seed)
                if self._lan is not None:
                    nursery.start_soon(self._lan.run, self._met_on_lan)
                nursery.start_soon(self._acquainted.keep_book, self._wake)
                nursery.start_soon(self._enquiry.run, self._to_ask, self._acquainted.nearest, self._wake)
                nursery.start_soon(self._watch_moves)
                await self._dial_around(nursery)

    def known(self) -> Mapping[bytes, Sequence[str]]:
        """Every peer that this node knows of, connected or not, and where it might be."""
        found: dict[bytes, Sequence[str]] = {each.public: each.addresses for each in self._candidates}
        found |= {entry.public: entry.addresses for entry in self._book}
        found |= {public: found.get(public, ()) for public in self._acquainted.connected()}
        return found | dict(self._acquainted.dialable())

    @property
    def hopes(self) -> bool:
        """Whether there is anybody whom this node might yet meet by itself."""
        return bool(self._seeds) or self._lan is not None or bool(self.known())

    def suggest(self, public: bytes, addresses: Iterable[str], why: str) -> None:
        """Hand in a peer that was found elsewhere. It is tried when peers are wanted."""
        if self._candidates.add(public, addresses, Source.SUGGESTED, least=self._acquainted.nearest()):
            self.counts[f"suggested by {why}"] += 1
            self._wake()

    # who comes and goes

    def _came(self, public: bytes, we_dialled: bool) -> None:  # noqa: FBT001 - a callback of one meaning
        if we_dialled:
            self._candidates.reached(public)
        if self._candidates.source_of(public) is Source.LOST or len(self._acquainted.connected()) == 1:
            self._candidates.hurry(but=public)  # the network is back, or a part of it
        self._wake()

    def _went(self, public: bytes, addresses: Sequence[str], seconds: float) -> None:
        self._enquiry.forget(public)
        self._candidates.add(public, addresses, Source.LOST)
        if seconds >= BRIEF_SECONDS:
            self._candidates.settled(public)
        else:
            self._candidates.failed(public)
        self._wake()

    def _met_on_lan(self, public: bytes, addresses: Sequence[str]) -> None:
        if self._candidates.add(public, addresses, Source.LAN):
            self._wake()

    def _to_ask(self) -> Collection[bytes]:
        ours = self._acquainted.ours()
        return ours if len(ours) < self._most else ()

    def _wake(self) -> None:
        self._changed.set()

    # dials

    async def _dial_around(self, nursery: trio.Nursery) -> None:
        while True:
            self._changed = trio.Event()
            connected = self._acquainted.connected()
            skip = connected | self._dialling
            while (worst := self._room(len(connected))) is not None:
                candidate = self._candidates.next(skip, worst)
                if candidate is None:
                    break
                skip.add(candidate.public)
                if self._host.welcome(candidate.public):
                    self._dialling.add(candidate.public)
                    nursery.start_soon(self._dial, candidate)
            with trio.move_on_after(
                max(0.05, min(self._candidates.due(skip) - trio.current_time(), TICK_SECONDS))
            ):
                await self._changed.wait()

    def _room(self, have: int) -> Source | None:
        """Up to which kind of candidate somebody may be dialled now; None for nobody."""
        if have < self._wanted:
            return Source.TOLD if len(self._dialling) < DIALS else None
        if self._dialling or have >= 2 * self._most:
            return None
        if have < self._most:
            return Source.TOLD
        if trio.current_time() < self._visit_at:
            return Source.LOST
        self._visit_at = trio.current_time() + VISIT_SECONDS * (0.5 + self._luck.random())
        return Source.SEED

    async def _dial(self, candidate: Candidate) -> None:
        peer = id_of(candidate.public)
        ways = [Multiaddr(way) for way in candidate.addresses]
        self.counts["dialled"] += 1
        try:
            with boundary(DialError, f"dialling {peer}"), trio.fail_after(DIAL_SECONDS):
                self._host.get_peerstore().add_addrs(peer, ways, _STORE_SECONDS)
                await self._host.get_network().dial_peer(peer)
        except DialError as error:
            _log.debug("%s", error)
            self._failed(candidate.public)
        finally:
            self._dialling.discard(candidate.public)
            self._wake()

    def _failed(self, public: bytes) -> None:
        connected = self._acquainted.connected()
        if public in connected:
            return  # it came to us meanwhile
        self.counts["failed"] += 1
        with suppress(PeerStoreError):  # hearsay must not pile up in the library's store
            self._host.get_peerstore().clear_peerdata(id_of(public))
        if connected:  # with no peer at all it says more about us than about them
            self._book.failed(public)
        dropped = self._candidates.failed(public, alone=not connected)
        if dropped is not None:
            _log.debug("%s is given up", peer_id(public))
            self._enquiry.dead(dropped.teller)

    # where they come from

    async def _follow(self, seed: Seed) -> None:
        """Keep a seed's addresses fresh: its name may stand for others tomorrow."""
        tries, said = 0, ""
        while True:
            try:
                places = await resolve(seed)
            except SeedError as error:
                tries += 1
                if error.what != said:
                    said = error.what
                    _log.warning("a seed is skipped for now: %s", error)
            else:
                tries, said = 0, ""
                for place in places:
                    self._candidates.add(place.public, place.addresses, Source.SEED)
                self._wake()
                if not seed.is_named:
                    return
            first, cap = SEED_PAUSE
            pause = min(cap, first * 2.0 ** min(tries, 30)) if tries else cap
            await trio.sleep(pause * (0.5 + self._luck.random() / 2))

    async def _watch_moves(self) -> None:
        """A laptop that wakes up elsewhere tries everybody again."""
        before = set(interfaces())
        while True:
            await trio.sleep(MOVE_SECONDS)
            now = set(interfaces())
            if now != before:
                before = now
                self._candidates.hurry()
                self._wake()
