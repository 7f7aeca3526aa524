"""Who comes and goes, as libp2p's swarm tells it. It knows peers by their keys, and does nothing about them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.connection_types import ConnectionType
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from echo_node.net.host import HardHost, key_of
from echo_node.net.meeting.places import of_socket


class _Comings(INotifee):
    """libp2p wants all six; two are of interest. They return at once, since the swarm waits for them."""

    def __init__(self, came: Callable[[bytes, INetConn], None], went: Callable[[bytes], None]) -> None:
        self._came = came
        self._went = went

    async def connected(self, network: INetwork, conn: INetConn) -> None:  # noqa: ARG002 - libp2p's signature
        if (public := key_of(conn.muxed_conn.peer_id)) is not None:
            self._came(public, conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """Told only when the last connection of a peer has ended."""
        peer = conn.muxed_conn.peer_id
        public = key_of(peer)
        if public is not None and not network.get_connections(peer):
            self._went(public)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def remote_of(connection: INetConn) -> tuple[str, int] | None:
    """IP address and port of the other end; None where there is none, as behind a relay."""
    if connection.get_connection_type() is ConnectionType.RELAYED:
        return None
    found: tuple[str, int] | None = connection.muxed_conn.get_remote_address()  # type: ignore[attr-defined]
    return found


def dialled(connection: INetConn) -> str | None:
    """The address that this node dialled for a connection; None if the other end did, or a relay is between."""
    remote = remote_of(connection)
    outbound = connection.direction is Direction.OUTBOUND  # type: ignore[attr-defined]
    return of_socket(*remote) if outbound and remote is not None else None


@contextmanager
def watching(
    host: HardHost, came: Callable[[bytes, INetConn], None], went: Callable[[bytes], None]
) -> Generator[None]:
    """Tell of each connection that is made, and of each peer whose last one has ended, until the context is left."""
    notifee = _Comings(came, went)
    network = host.get_network()
    network.register_notifee(notifee)
    try:
        yield
    finally:
        network.remove_notifee(notifee)
