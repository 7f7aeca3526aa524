"""Connected peers, since when, and their verified addresses.

An address is one that this node dialled itself, or that the peer signed. Peers without our
peer-exchange protocol are counted as connected and not passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import trio
from libp2p.abc import INetConn
from libp2p.peer.peerstore import PeerStoreError

from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.address_scope import Scope, usable
from echo_node.net.discovery.connection_events import dialled_address, watch_connections
from echo_node.net.host import HardHost
from echo_node.net.swarm import id_of, key_of
from protocol import limits
from protocol.topics import PEERS_STREAM

RECORD_SECONDS: Final = (0.2, 2.0)
"""Seconds between reads of the peers' records: while a peer is new, and otherwise."""
NEW_SECONDS: Final = 10.0


class ConnectedPeers:
    """The connected peers of one node and their addresses."""

    def __init__(self, host: HardHost, book: AddressBook) -> None:
        self._host = host
        self._book = book
        self._since: dict[bytes, float] = {}
        self._addresses: dict[bytes, tuple[str, ...]] = {}
        self._records: dict[bytes, object] = {}
        self._newest = -NEW_SECONDS

    def connected(self) -> set[bytes]:
        """Return the connected peers."""
        keys = (key_of(peer) for peer, live in self._host.get_network().get_connections_map().items() if live)
        return {key for key in keys if key is not None}

    def exchanging(self) -> list[bytes]:
        """Return the connected peers that advertise the peer-exchange protocol."""
        return [public for public in self.connected() if self._host.speaks(id_of(public), PEERS_STREAM)]

    def dialable(self) -> Mapping[bytes, Sequence[str]]:
        """Return the peers that may be passed on, and their addresses."""
        return {
            public: self._addresses[public] for public in self.exchanging() if self._addresses.get(public)
        }

    def scope_towards(self, peer: bytes) -> Scope:
        """Return the scope that an address needs to mean the same here and at the peer."""
        return self._host.swarm.teller(id_of(peer)).met

    @contextmanager
    def watch(
        self,
        connected: Callable[[bytes, bool], None],
        disconnected: Callable[[bytes, Sequence[str], float], None],
    ) -> Generator[None]:
        """Report connections (peer, outbound), lost peers (peer, addresses, seconds)."""

        def on_connection(public: bytes, connection: INetConn) -> None:
            self._newest = trio.current_time()
            self._since.setdefault(public, self._newest)
            if (way := dialled_address(connection)) is not None:
                self._addresses[public] = tuple(dict.fromkeys((way, *self._addresses.get(public, ()))))[
                    : limits.ADDRESSES
                ]
            connected(public, way is not None)

        def on_end(public: bytes) -> None:
            now = trio.current_time()
            self._records.pop(public, None)
            disconnected(public, self._addresses.pop(public, ()), now - self._since.pop(public, now))

        with watch_connections(self._host, on_connection, on_end):
            yield

    async def keep_book(self, changed: Callable[[], None]) -> None:
        """Write the peers' addresses to the book, and again when their records change."""
        while True:
            for public in self.exchanging():
                if self._store_record(public):
                    changed()
            is_new = trio.current_time() < self._newest + NEW_SECONDS
            await trio.sleep(RECORD_SECONDS[0] if is_new else RECORD_SECONDS[1])

    def _store_record(self, public: bytes) -> bool:
        peer = id_of(public)
        try:
            envelope = self._host.get_peerstore().get_peer_record(peer)
        except PeerStoreError:
            return False  # its addresses have expired; the stored ones stand
        if envelope is None or self._records.get(public) is envelope:
            return False
        named = map(str, envelope.record().addrs)
        signed = usable(
            self._host.door.admit(public, named, self._host.swarm.teller(peer)), public, most=limits.ADDRESSES
        )  # without names, which are dialled while their peer is known and not written down
        live = self._host.get_network().get_connections(peer)
        ways = [way for connection in live if (way := dialled_address(connection)) is not None]
        if public not in self._records:
            for way in ways:
                self._book.reached(public, way)
        self._book.signed(public, signed)
        self._records[public] = envelope
        self._addresses[public] = tuple(dict.fromkeys((*ways, *signed)))[: limits.ADDRESSES]
        return True
