"""Connection events of a libp2p swarm, by public key."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from echo_node.net.discovery.address_scope import of_socket
from echo_node.net.host import HardHost
from echo_node.net.swarm import key_of, remote_of


class _ConnectionNotifee(INotifee):
    """Forward two of libp2p's notifications, at once, as the swarm waits for them."""

    def __init__(
        self, on_connected: Callable[[bytes, INetConn], None], on_disconnected: Callable[[bytes], None]
    ) -> None:
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected

    async def connected(self, network: INetwork, conn: INetConn) -> None:  # noqa: ARG002 - libp2p's signature
        if (public := key_of(conn.muxed_conn.peer_id)) is not None:
            self._on_connected(public, conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """Forward the end of a peer's last connection."""
        peer = conn.muxed_conn.peer_id
        public = key_of(peer)
        if public is not None and not network.get_connections(peer):
            self._on_disconnected(public)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def dialled_address(connection: INetConn) -> str | None:
    """Return the address that this node dialled; None if inbound or relayed."""
    remote = remote_of(connection)
    outbound = connection.direction is Direction.OUTBOUND  # type: ignore[attr-defined]
    return of_socket(*remote) if outbound and remote is not None else None


@contextmanager
def watch_connections(
    host: HardHost,
    on_connected: Callable[[bytes, INetConn], None],
    on_disconnected: Callable[[bytes], None],
) -> Generator[None]:
    """Report new connections and lost peers until the context is left."""
    notifee = _ConnectionNotifee(on_connected, on_disconnected)
    network = host.get_network()
    network.register_notifee(notifee)
    try:
        yield
    finally:
        network.remove_notifee(notifee)
