"""A libp2p swarm with bounded connections that dials several addresses at once.

py-libp2p's own swarm dials addresses one after the other, opens streams on closed connections and
keeps inbound connections after they end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import IMuxedConn, INetConn, IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError as Libp2pStreamError
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from echo_node.errors import EchoError, PeerError, boundary
from echo_node.net.connection_manager import ConnectionManager, Network, networks_of
from echo_node.net.discovery.address_door import UNKNOWN, AddressDoor, Teller, Trust, is_name
from echo_node.net.discovery.address_scope import Scope, of_socket, scope_of_ip, without_peer
from echo_node.net.discovery.seeds import numbers_of
from echo_node.net.peerstore import BoundedPeerStore
from echo_node.net.rate_limit import TokenBucket
from echo_node.net.reachability import multiaddrs
from protocol.identity import PEER_ID_BYTES, peer_id_bytes

PENDING_HANDSHAKES: Final = 64
"""Inbound connections without a finished handshake; one more ends the oldest of the busiest IP."""
PENDING_EACH: Final = 16
"""The same from one IPv4 address or IPv6 /64; one more ends the oldest of them. Loopback may have
all: whoever runs programs on this machine can do worse to it."""
HANDSHAKES_PER_SECOND: Final = 8.0
HANDSHAKES_BURST: Final = 128
"""Handshakes of one such network, in the long run and at once; a handshake costs milliseconds."""
NETWORKS: Final = 4_096
"""Networks with a rate of handshakes; the least recently seen is forgotten."""
HANG_UP_SECONDS: Final = 5.0
HAPPY_EYEBALLS_SECONDS: Final = 0.25
"""Seconds that one address has before the next one is dialled too."""
ADDRESSES_TO_DIAL: Final = 8
BROKEN: Final = (Libp2pStreamError, SwarmException, StreamFailure, IOException, trio.TooSlowError, OSError)
"""Errors that libp2p raises on a stream whose peer, or the path to it, is gone."""


class DialError(PeerError):
    """No peer, or a peer that breaks the protocol, at a dialled address."""


def id_of(public: bytes) -> ID:
    """Return the libp2p peer id of an Ed25519 public key."""
    return ID(peer_id_bytes(public))


def key_of(peer: ID) -> bytes | None:
    """Return the Ed25519 public key in a peer id; None for other key types."""
    binary = peer.to_bytes()
    return binary[-32:] if len(binary) == PEER_ID_BYTES and binary == peer_id_bytes(binary[-32:]) else None


def remote_of(connection: INetConn) -> tuple[str, int] | None:
    """Return IP address and port of the other end; None behind a relay."""
    if connection.get_connection_type() is ConnectionType.RELAYED:
        return None
    found: tuple[str, int] | None = connection.muxed_conn.get_remote_address()  # type: ignore[attr-defined]
    return found


def _networks_of(muxed_conn: IMuxedConn) -> tuple[Network, ...]:
    """Return the networks that an inbound connection counts for."""
    if muxed_conn.get_connection_type() is ConnectionType.RELAYED:
        return networks_of(None, str(next(iter(muxed_conn.get_transport_addresses()), "")))
    remote = muxed_conn.get_remote_address()  # type: ignore[attr-defined]
    return networks_of(remote[0] if remote else None)


class _NoAutoConnector(AutoConnector):
    """Dial nobody: the library's own dials many unverified addresses."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:  # noqa: ARG002 - the library's signature
        await trio.lowlevel.checkpoint()

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        """Do nothing: the library's keeps an unbounded list."""


@dataclass(eq=False, slots=True)
class _PendingHandshake:
    """An inbound connection during its handshake."""

    network: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class HardSwarm(Swarm):
    """A swarm that dials what its door admits and forgets ended inbound connections."""

    def __init__(
        self,
        peer: ID,
        store: BoundedPeerStore,
        upgrader: TransportUpgrader,
        config: ConnectionConfig,
        *,
        door: AddressDoor,
        places: ConnectionManager,
    ) -> None:
        self.store = store
        self.door = door
        """The one door for addresses, before the peerstore."""
        self.places = places
        """Inbound connections that have a place."""
        super().__init__(
            peer,
            store,
            upgrader,
            transports=[TCP()],
            retry_config=RetryConfig(max_retries=0),
            connection_config=config,
        )

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _NoAutoConnector(swarm=self)
        # the library counts pending ones too: it must not turn away whom the manager makes room for
        self._inbound_limiter = trio.CapacityLimiter(self.connection_config.max_connections)
        self._handshakes: list[_PendingHandshake] = []
        self._handshake_rates: OrderedDict[str, TokenBucket] = OrderedDict()

    def get_connections(self, peer_id: ID | None = None) -> list[INetConn]:
        """Return the open connections; the library returns closed ones too and uses them."""
        return [conn for conn in super().get_connections(peer_id) if not conn.is_closed]

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """Return an open connection, or dial until the first address answers."""
        if live := self.get_connections(peer_id):
            return live
        if peer_id in self._ongoing_dials:
            await self._ongoing_dials[peer_id].wait()
            if live := self.get_connections(peer_id):
                return live
            raise SwarmException(f"the pending dial of {peer_id} failed")
        return [await self._dial_once(peer_id, self._addresses(peer_id))]

    async def dial_direct(self, peer_id: ID, hints: Sequence[Multiaddr] = ()) -> INetConn:
        """Return a connection without a relay. `hints` are tried first and not stored."""
        if peer_id in self._ongoing_dials and not self.direct(peer_id):
            await self._ongoing_dials[peer_id].wait()
        if live := self.direct(peer_id):
            return live[0]
        known = [*self._allowed(peer_id, hints), *self._usable(peer_id)]
        direct = [each for each in known if not multiaddrs.is_circuit(each)][:ADDRESSES_TO_DIAL]
        if not direct or peer_id in self._ongoing_dials:
            raise SwarmException(f"no direct address of {peer_id}")
        return await self._dial_once(peer_id, direct)

    def direct(self, peer_id: ID) -> list[INetConn]:
        """Return the connections to the peer that use no relay."""
        conns = self.get_connections(peer_id)
        return [conn for conn in conns if conn.get_connection_type() is not ConnectionType.RELAYED]

    def teller(self, peer_id: ID) -> Teller:
        """Return the peer as a teller of addresses, by its nearest connection.

        Keys of one network share one budget; on this machine, where all do, each key has its own.
        """
        remotes = [remote_of(conn) for conn in self.get_connections(peer_id)]
        met = [(scope_of_ip(remote[0]), remote[0]) for remote in remotes if remote is not None]
        known = [each for each in met if each[0] is not Scope.NOWHERE]
        if not known:
            return Teller(Trust.PEER, Scope.PUBLIC, str(peer_id)) if remotes else UNKNOWN
        nearest, host = min(known)
        ip = multiaddrs.ip(host)
        budget = str(peer_id) if nearest is Scope.LOOPBACK or ip is None else multiaddrs.network(ip)
        return Teller(Trust.PEER, nearest, budget)

    async def _dial_once(self, peer_id: ID, to: Sequence[Multiaddr]) -> INetConn:
        self._ongoing_dials[peer_id] = done = trio.Event()
        try:
            return await self._dial_first(peer_id, to)
        finally:
            done.set()
            del self._ongoing_dials[peer_id]

    def _addresses(self, peer_id: ID) -> list[Multiaddr]:
        usable = self._usable(peer_id)
        if not usable:
            raise SwarmException(f"no address of {peer_id} can be dialled")
        # direct addresses first, but never so many that no circuit is tried
        direct = [each for each in usable if not multiaddrs.is_circuit(each)]
        circuits = [each for each in usable if multiaddrs.is_circuit(each)]
        return [*direct[: ADDRESSES_TO_DIAL - min(2, len(circuits))], *circuits][:ADDRESSES_TO_DIAL]

    def _usable(self, peer_id: ID) -> list[Multiaddr]:
        return self._allowed(peer_id, self.peerstore.addrs(peer_id))

    def _allowed(self, peer_id: ID, known: Sequence[Multiaddr]) -> list[Multiaddr]:
        """Return the addresses that the door allows, each once, with the peer's id."""
        public = key_of(peer_id)
        if public is None:
            return []
        whole = [each for each in (multiaddrs.to(each, peer_id) for each in known) if each is not None]
        unique = {without_peer(str(each), public): each for each in whole}
        return [
            each
            for text, each in unique.items()
            if self.door.allows(public, text) and self.transport_manager.transport_for_dialing(each)
        ]

    async def _dial_admitted(self, address: Multiaddr, peer_id: ID) -> INetConn:
        """Dial an address once, if the door lets it through, which it counts."""
        public = key_of(peer_id)
        text = without_peer(str(address), public or b"")
        if public is None or not self.door.take(public, text):
            raise SwarmException("the address was not admitted, or has no tries left")
        if is_name(text):
            text = await self._resolved(public, text)
            address = Multiaddr(f"{text}/p2p/{peer_id}")
        connection = await self._dial_addr_single_attempt(address, peer_id)
        self.door.reached(public, text)
        return connection

    async def _resolved(self, public: bytes, name: str) -> str:
        """Resolve a name to an address that its teller may name, and count that dial too."""
        _, kind, host, _, port = name.split("/")
        numbers = [of_socket(ip, int(port)) for ip in await numbers_of(host, int(port), kind)]
        for found in self.door.admit_resolved(public, name, numbers):
            if self.door.take(public, found):
                return found
        raise SwarmException("the name leads to no address that its teller may name")

    async def _dial_first(self, peer_id: ID, to: Sequence[Multiaddr]) -> INetConn:
        found: list[INetConn] = []
        errors: list[str] = []

        async def dial(address: Multiaddr, failed: trio.Event) -> None:
            try:
                # dialling the relay takes a slot of the limiter itself: the circuit must not hold
                # one as well
                async with nullcontext() if multiaddrs.is_circuit(address) else self._global_dial_limiter:
                    # the library does not contain what a peer can make Noise raise
                    with (
                        boundary(DialError, str(address)),
                        trio.fail_after(self.connection_config.dial_timeout),
                    ):
                        found.append(await self._dial_admitted(address, peer_id))
                nursery.cancel_scope.cancel()
            except (EchoError, ExceptionGroup) as error:
                root = error.__cause__ or error
                errors.append(f"{address}: {root.__cause__ or root!r}")
                failed.set()

        async with trio.open_nursery() as nursery:
            for address in to:
                failed = trio.Event()
                nursery.start_soon(dial, address, failed)
                with trio.move_on_after(HAPPY_EYEBALLS_SECONDS):
                    await failed.wait()
        if not found:
            raise SwarmException(f"none of {len(to)} addresses of {peer_id} answered: {'; '.join(errors)}")
        return found[0]

    async def upgrade_inbound_raw_conn(self, raw_conn: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Accept a connection and return when it has ended.

        The caller holds an inbound slot until then.
        """
        remote = raw_conn.get_remote_address()
        ip = multiaddrs.ip(remote[0]) if remote else None
        bounded = ip is not None and not ip.is_loopback
        pending = _PendingHandshake(multiaddrs.network(ip) if ip else "")
        if bounded and not self._handshake_rate(pending.network).spend():
            raise SwarmException("too many handshakes from one network")
        live = [each for each in self._handshakes if not each.scope.cancel_called]
        busy = Counter(each.network for each in live)
        if bounded and busy[pending.network] >= PENDING_EACH:
            next(each for each in live if each.network == pending.network).scope.cancel()
        elif len(live) >= PENDING_HANDSHAKES:
            busiest = busy.most_common(1)[0][0]
            next(each for each in live if each.network == busiest).scope.cancel()
        self._handshakes.append(pending)
        try:
            with pending.scope:
                muxed = await super().upgrade_inbound_raw_conn(raw_conn, maddr)
        finally:
            self._handshakes.remove(pending)
        if pending.scope.cancelled_caught:
            raise SwarmException("no handshake in time, and other connections wait")
        try:
            await muxed.event_closed.wait()  # type: ignore[attr-defined]
        finally:
            self.places.leave(muxed)
        raise SwarmException("the connection ended")

    def _handshake_rate(self, network: str) -> TokenBucket:
        rate = self._handshake_rates.pop(network, None) or TokenBucket(
            HANDSHAKES_PER_SECOND, HANDSHAKES_BURST
        )
        self._handshake_rates[network] = rate
        while len(self._handshake_rates) > NETWORKS:
            self._handshake_rates.popitem(last=False)
        return rate

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Add a connection; an inbound one needs a place. Refuse keys but Ed25519."""
        public = key_of(muxed_conn.peer_id)
        if public is None:
            await muxed_conn.close()
            raise SwarmException(f"{muxed_conn.peer_id} has a key that is not Ed25519")
        if direction != "inbound":
            return await super().add_conn(muxed_conn, direction)
        ended = self.places.admit(public, _networks_of(muxed_conn), muxed_conn)
        if ended is None:
            await muxed_conn.close()
            raise SwarmException(f"{muxed_conn.peer_id} gets no place")
        for each in ended:
            self.manager.run_task(self._hang_up, each)
        try:
            return await super().add_conn(muxed_conn, direction)
        except BaseException:
            self.places.leave(muxed_conn)
            raise

    async def _hang_up(self, muxed_conn: IMuxedConn) -> None:
        """End a connection whose place went to another."""
        conns = self.connections.get(muxed_conn.peer_id, ())
        with trio.move_on_after(HANG_UP_SECONDS):
            for each in [each for each in conns if each.muxed_conn is muxed_conn]:
                await each.close()
            await muxed_conn.close()

    async def close(self) -> None:
        """Close all connections concurrently: the library takes 0.1 s for each in turn."""
        async with trio.open_nursery() as nursery:
            for connection in self.get_connections():
                nursery.start_soon(self._close_connection_async, connection)
        await super().close()
