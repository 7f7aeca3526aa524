"""Whom this node is connected to, since when, and where each can be dialled: what it may tell others and write down.

A place is what this node dialled itself, or what the peer signed. Peers that do not speak our language may come and go:
they are counted and not passed on. It dials nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import trio
from libp2p.abc import INetConn
from libp2p.peer.peerstore import PeerStoreError

from echo_node.net.host import HardHost, id_of, key_of
from echo_node.net.meeting.comings import dialled, remote_of, watching
from echo_node.net.meeting.peerbook import PeerBook
from echo_node.net.meeting.places import Scope, scope_of_ip, usable
from protocol import limits
from protocol.topics import PEERS_STREAM

NOTE_SECONDS: Final = (0.2, 2.0)
"""How often peers' words are looked at: while there is a new peer, and else."""
NEW_SECONDS: Final = 10.0


class Acquaintances:
    """The connected peers of one node."""

    def __init__(self, host: HardHost, book: PeerBook) -> None:
        self._host = host
        self._book = book
        self._since: dict[bytes, float] = {}
        self._where: dict[bytes, tuple[str, ...]] = {}
        self._noted: dict[bytes, object] = {}
        self._newest = -NEW_SECONDS

    def connected(self) -> set[bytes]:
        """The peers that there is a connection to now."""
        keys = (key_of(peer) for peer, live in self._host.get_network().get_connections_map().items() if live)
        return {key for key in keys if key is not None}

    def ours(self) -> list[bytes]:
        """Those of them that have said that they speak our language."""
        return [public for public in self.connected() if self._host.speaks(id_of(public), PEERS_STREAM)]

    def dialable(self) -> Mapping[bytes, Sequence[str]]:
        """Those of them that can be told to others, and where they are."""
        return {public: self._where[public] for public in self.ours() if self._where.get(public)}

    def nearest(self, peer: bytes | None = None) -> Scope:
        """How far an address must lead to mean the same here and at the peer: as far as the way between us.

        Without a peer: as far as the shortest way to any.
        """
        network = self._host.get_network()
        live = network.get_connections() if peer is None else network.get_connections(id_of(peer))
        remotes = (remote_of(connection) for connection in live)
        scopes = [scope_of_ip(remote[0]) for remote in remotes if remote is not None]
        unknown = Scope.PUBLIC if peer is not None or live else Scope.LOOPBACK
        return min((each for each in scopes if each is not Scope.NOWHERE), default=unknown)

    @contextmanager
    def watch(
        self, came: Callable[[bytes, bool], None], went: Callable[[bytes, Sequence[str], float], None]
    ) -> Generator[None]:
        """Tell who comes, and whether we dialled; and who goes, where it was, and for how many seconds."""

        def on_connection(public: bytes, connection: INetConn) -> None:
            self._newest = trio.current_time()
            self._since.setdefault(public, self._newest)
            if (way := dialled(connection)) is not None:
                self._where[public] = tuple(dict.fromkeys((way, *self._where.get(public, ()))))[
                    : limits.ADDRESSES
                ]
            came(public, way is not None)

        def on_end(public: bytes) -> None:
            now = trio.current_time()
            self._noted.pop(public, None)
            went(public, self._where.pop(public, ()), now - self._since.pop(public, now))

        with watching(self._host, on_connection, on_end):
            yield

    async def keep_book(self, news: Callable[[], None]) -> None:
        """Write down where peers of ours are, once and whenever they say something new."""
        while True:
            for public in self.ours():
                if self._note(public):
                    news()
            is_new = trio.current_time() < self._newest + NEW_SECONDS
            await trio.sleep(NOTE_SECONDS[0] if is_new else NOTE_SECONDS[1])

    def _note(self, public: bytes) -> bool:
        peer = id_of(public)
        try:
            envelope = self._host.get_peerstore().get_peer_record(peer)
        except PeerStoreError:
            return False  # its addresses are old; those that were noted stand
        if envelope is None or self._noted.get(public) is envelope:
            return False
        signed = usable(map(str, envelope.record().addrs), public, most=limits.ADDRESSES)
        live = self._host.get_network().get_connections(peer)
        ways = [way for connection in live if (way := dialled(connection)) is not None]
        if public not in self._noted:
            for way in ways:
                self._book.reached(public, way)
        self._book.signed(public, signed)
        self._noted[public] = envelope
        self._where[public] = tuple(dict.fromkeys((*ways, *signed)))[: limits.ADDRESSES]
        return True
