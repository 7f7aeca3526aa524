"""Dialler: seeds, address book, LAN and referred peers until there are enough.

No connection is ever closed here. Lost peers are dialled even when there are enough, so that two
halves of a partitioned swarm merge again.
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

from echo_node.errors import boundary
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.address_door import LAN, USER, Teller, book_tellers, run_teller
from echo_node.net.discovery.address_scope import interfaces
from echo_node.net.discovery.connected_peers import ConnectedPeers
from echo_node.net.discovery.dial_queue import Candidate, DialQueue, Source
from echo_node.net.discovery.mdns import MdnsDiscovery
from echo_node.net.discovery.peer_exchange import PeerExchange, PeerExchangeSchedule
from echo_node.net.discovery.seeds import Seed, SeedError, resolve
from echo_node.net.host import HardHost
from echo_node.net.request_response import RequestResponse
from echo_node.net.swarm import DialError, id_of, key_of
from protocol import limits, peer_id
from protocol.topics import PEERS_STREAM

WANTED: Final = 8
MOST: Final = 16
"""Peers up to which a node dials by itself; inbound connections come on top."""
DIALS: Final = 8
"""Concurrent dials while there are fewer peers than wanted; then one at a time."""
DIAL_SECONDS: Final = 8.0
FROM_BOOK: Final = 128
BRIEF_SECONDS: Final = 5.0
"""Seconds; a connection that ends sooner counts as a failed dial."""
SEED_PAUSE: Final = (1.0, 30.0)
"""First and longest pause before a name is resolved again, in seconds."""
VISIT_SECONDS: Final = 600.0
"""Seconds between dials of a seed while there are enough peers."""
TICK_SECONDS: Final = 0.5
INTERFACE_SECONDS: Final = 5.0
_STORE_SECONDS: Final = 3_600
_log = logging.getLogger("echo_node.net.discovery.dialer")


class Dialer:
    """Keeps one node connected to enough peers.

    Without a `book` addresses are kept in memory; without a `lan` mDNS is off.
    """

    def __init__(
        self,
        host: HardHost,
        *,
        seeds: Sequence[Seed] = (),
        run_seeds: Sequence[Seed] = (),
        book: AddressBook | None = None,
        lan: MdnsDiscovery | None = None,
        wanted: int = WANTED,
        most: int = MOST,
        requests: RequestResponse | None = None,
    ) -> None:
        self._host = host
        me = key_of(host.get_id()) or b""
        named = {seed.text for seed in seeds}
        run = [seed for seed in run_seeds if seed.text not in named]
        told_by = run_teller(seed.where for seed in run)
        self._seeds = [*((seed, USER) for seed in seeds), *((seed, told_by) for seed in run)]
        self._door = host.door
        self._book = book if book is not None else AddressBook(None)
        self._lan = lan
        self._wanted = wanted
        self._most = max(most, wanted)
        self._requests = requests or RequestResponse(host, Counter())
        self._queue = DialQueue(me, trio.current_time)
        self._peers = ConnectedPeers(host, self._book)
        self._exchange = PeerExchange(me, self._requests, self._peers.dialable, self._peers.scope_towards)
        self._schedule = PeerExchangeSchedule(self._exchange, self._queue, self._admit_from)
        self._dialling: set[bytes] = set()
        self._changed = trio.Event()
        self._visit_at = 0.0
        self._random = random.SystemRandom()
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Dial until cancelled."""
        for rank, entry in enumerate(self._book.best(FROM_BOOK)):
            reached, signed = book_tellers(entry.dialled, entry.signed)
            ways = self._door.admit(entry.public, entry.dialled, reached)
            ways += self._door.admit(entry.public, entry.signed, signed)
            self._queue.add(entry.public, ways, Source.BOOK, rank=rank)
        serving = self._requests.serve(PEERS_STREAM, self._exchange.respond, most=limits.PEERS_QUESTION_BYTES)
        with serving, self._peers.watch(self._on_connected, self._on_disconnected):
            async with trio.open_nursery() as nursery:
                for seed, teller in self._seeds:
                    nursery.start_soon(self._resolve_seed, seed, teller)
                if self._lan is not None:
                    nursery.start_soon(self._lan.run, self._on_mdns)
                nursery.start_soon(self._peers.keep_book, self._wake)
                nursery.start_soon(
                    self._schedule.run, self._peers_to_ask, self._peers.scope_towards, self._wake
                )
                nursery.start_soon(self._watch_interfaces)
                await self._dial_loop(nursery)

    def known(self) -> Mapping[bytes, Sequence[str]]:
        """Return every known peer, connected or not, and its addresses."""
        found: dict[bytes, Sequence[str]] = {each.public: each.addresses for each in self._queue}
        found |= {entry.public: entry.addresses for entry in self._book}
        found |= {public: found.get(public, ()) for public in self._peers.connected()}
        return found | dict(self._peers.dialable())

    @property
    def has_candidates(self) -> bool:
        """Return whether there is any peer that this node might still dial."""
        return bool(self._seeds) or self._lan is not None or bool(self.known())

    def suggest(self, public: bytes, addresses: Iterable[str], why: str) -> None:
        """Add a peer with admitted addresses; it is dialled when peers are wanted."""
        if self._queue.add(public, addresses, Source.SUGGESTED):
            self.counts[f"suggested by {why}"] += 1
            self._wake()

    # Connection events

    def _on_connected(self, public: bytes, outbound: bool) -> None:  # noqa: FBT001 - a callback
        if outbound:
            self._queue.reached(public)
        if self._queue.source_of(public) is Source.LOST or len(self._peers.connected()) == 1:
            self._queue.retry_now(but=public)  # the network, or a part of it, is back
        self._wake()

    def _on_disconnected(self, public: bytes, addresses: Sequence[str], seconds: float) -> None:
        self._schedule.forget(public)
        self._queue.add(public, addresses, Source.LOST)
        if seconds >= BRIEF_SECONDS:
            self._queue.settled(public)
        else:
            self._queue.failed(public)
        self._wake()

    def _on_mdns(self, public: bytes, addresses: Sequence[str]) -> None:
        if self._queue.add(public, self._door.admit(public, addresses, LAN), Source.LAN):
            self._wake()

    def _admit_from(self, teller: bytes, public: bytes, addresses: Sequence[str]) -> list[str]:
        return self._door.admit(public, addresses, self._host.swarm.teller(id_of(teller)))

    def _peers_to_ask(self) -> Collection[bytes]:
        peers = self._peers.exchanging()
        return peers if len(peers) < self._most else ()

    def _wake(self) -> None:
        self._changed.set()

    # Dials

    async def _dial_loop(self, nursery: trio.Nursery) -> None:
        while True:
            self._changed = trio.Event()
            connected = self._peers.connected()
            skip = connected | self._dialling
            while (worst := self._room(len(connected))) is not None:
                candidate = self._queue.next(skip, worst)
                if candidate is None:
                    break
                skip.add(candidate.public)
                if not self._host.scores.is_muted(candidate.public):
                    self._dialling.add(candidate.public)
                    nursery.start_soon(self._dial, candidate)
            with trio.move_on_after(
                max(0.05, min(self._queue.due(skip) - trio.current_time(), TICK_SECONDS))
            ):
                await self._changed.wait()

    def _room(self, have: int) -> Source | None:
        """Return the worst source that may be dialled now; None for no dial."""
        if have < self._wanted:
            return Source.REFERRED if len(self._dialling) < DIALS else None
        if self._dialling or have >= 2 * self._most:
            return None
        if have < self._most:
            return Source.REFERRED
        if trio.current_time() < self._visit_at:
            return Source.LOST
        self._visit_at = trio.current_time() + VISIT_SECONDS * (0.5 + self._random.random())
        return Source.SEED

    async def _dial(self, candidate: Candidate) -> None:
        peer = id_of(candidate.public)
        ways = [Multiaddr(way) for way in candidate.addresses]
        self.counts["dialled"] += 1
        try:
            with boundary(DialError, f"dialling {peer}"), trio.fail_after(DIAL_SECONDS):
                self._host.swarm.store.keep(peer, ways, _STORE_SECONDS)
                await self._host.get_network().dial_peer(peer)
        except DialError as error:
            _log.debug("%s", error)
            self._failed(candidate.public)
        finally:
            self._dialling.discard(candidate.public)
            self._wake()

    def _failed(self, public: bytes) -> None:
        connected = self._peers.connected()
        if public in connected:
            return  # it connected to this node meanwhile
        self.counts["failed"] += 1
        with suppress(PeerStoreError):  # unverified addresses must not pile up in the peerstore
            self._host.get_peerstore().clear_peerdata(id_of(public))
        if connected:  # without any peer the fault is more likely here
            self._book.failed(public)
        dropped = self._queue.failed(public, alone=not connected)
        if dropped is not None:
            _log.debug("candidate %s dropped", peer_id(public))
            self._schedule.count_dead(dropped.referrer)

    # Sources

    async def _resolve_seed(self, seed: Seed, teller: Teller) -> None:
        """Resolve a seed again and again: its DNS records may change."""
        tries, logged = 0, ""
        while True:
            try:
                places = await resolve(seed)
            except SeedError as error:
                tries += 1
                if error.what != logged:
                    logged = error.what
                    _log.warning("seed skipped for now: %s", error)
            else:
                tries, logged = 0, ""
                for place in places:
                    ways = self._door.admit(place.public, place.addresses, teller)
                    if not ways:
                        _log.warning("seed %s left out: its addresses may not be dialled", seed.text)
                    self._queue.add(place.public, ways, Source.SEED)
                self._wake()
                if not seed.is_named:
                    return
            first, cap = SEED_PAUSE
            pause = min(cap, first * 2.0 ** min(tries, 30)) if tries else cap
            await trio.sleep(pause * (0.5 + self._random.random() / 2))

    async def _watch_interfaces(self) -> None:
        """Retry all candidates when the network interfaces change."""
        before = set(interfaces())
        while True:
            await trio.sleep(INTERFACE_SECONDS)
            now = set(interfaces())
            if now != before:
                before = now
                self._queue.retry_now()
                self._wake()
