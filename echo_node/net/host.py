"""A libp2p host over TCP, Noise and Yamux, with limits and contained streams.

What py-libp2p accepts as an argument is passed in as a subclass; the rest is patched in
`libp2p_patches`.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.net import libp2p_patches
from echo_node.net.connection_manager import ConnectionManager
from echo_node.net.discovery.address_door import USER, AddressDoor, Teller
from echo_node.net.identify import (
    ENDED,
    IDENTIFY,
    PING,
    PUSH,
    IdentifyError,
    answer_pings,
    read_identify,
    store_identify,
)
from echo_node.net.noise import NoiseTransport
from echo_node.net.peer_scoring import PeerScores
from echo_node.net.peerstore import BoundedPeerStore
from echo_node.net.rate_limit import TokenBucket
from echo_node.net.reachability import multiaddrs
from echo_node.net.reachability.circuit import Circuits
from echo_node.net.swarm import PENDING_HANDSHAKES, HardSwarm, id_of, key_of
from echo_node.net.yamux.muxer import PROTOCOL_ID as YAMUX
from echo_node.net.yamux.muxer import Yamux
from protocol import Identity

CONNECTIONS: Final = 300
CONNECTIONS_PER_PEER: Final = 3
OUTBOUND_SHARE: Final = 6
"""One in this many connections is kept free for outbound dials."""
STREAMS_PER_PEER: Final = 64
"""Open inbound streams of one peer; more are reset."""
STREAMS_PER_SECOND: Final = 200
"""Inbound streams of one peer per second in the long run; more wait, and count as open."""
STREAMS_BURST: Final = 1_000
HANDSHAKE_SECONDS: Final = 10
ADDRESS_SECONDS: Final = 120
"""Time to live of a dialled address, in seconds, unless the peer itself advertises it."""
_log = logging.getLogger("echo_node.net.host")
_PORT_TAKEN: Final = "another program may use the port; give another one, or 0 for any"
_ADVICE: Final = {
    errno.EACCES: "ports below 1024 need privileges; give one from 1024 on, or 0 for any",
    errno.EADDRNOTAVAIL: "this machine does not have that address; /ip4/0.0.0.0 listens on all",
}
AddrsFactory = Callable[[list[Multiaddr]], list[Multiaddr]]
"""From the addresses that a host listens on to those that it advertises."""


class StreamError(EchoError):
    """An inbound stream whose handler failed."""


class HardHost(BasicHost):
    """A host that confines peer input and handler bugs to the stream they occur on."""

    def __init__(self, network: HardSwarm, scores: PeerScores) -> None:
        self.swarm = network
        self._advertised: AddrsFactory = list
        super().__init__(network)
        self.counts: Counter[str] = Counter()
        self.scores = scores
        """Faults of peers, by which they are muted."""
        self._on_identified: list[Callable[[ID], Awaitable[None]]] = []
        self._open: Counter[ID] = Counter()
        self._stream_rates: dict[ID, TokenBucket] = {}
        self.set_stream_handler(PUSH, self._handle_push)
        self.set_stream_handler(PING, answer_pings)
        self.circuits = Circuits(self)
        network.transport_manager.add_transport(self.circuits)

    def set_addrs_factory(self, factory: AddrsFactory) -> None:
        """Choose the advertised addresses with `factory`, as libp2p's AddrsFactory does."""
        self._advertised = factory

    def on_identified(self, handler: Callable[[ID], Awaitable[None]]) -> None:
        """Call `handler` whenever a peer has sent its protocols and addresses."""
        self._on_identified.append(handler)

    def direct(self, peer: ID) -> list[INetConn]:
        """Return the connections to a peer that use no relay."""
        return self.swarm.direct(peer)

    def is_relayed(self, peer: ID) -> bool:
        """Return whether the peer is connected through relays only."""
        return not self.direct(peer) and bool(self.swarm.get_connections(peer))

    @property
    def door(self) -> AddressDoor:
        """The one door for addresses of peers."""
        return self.swarm.door

    async def connect(self, peer_info: PeerInfo) -> None:
        """Connect to a peer at addresses that the user named.

        The library's own accepts a closed connection.
        """
        self.keep_addresses(peer_info.peer_id, peer_info.addrs, USER, seconds=ADDRESS_SECONDS)
        await self.connect_known(peer_info.peer_id)

    async def connect_known(self, peer: ID) -> None:
        """Connect to a peer at addresses that are in the peerstore."""
        await self.swarm.dial_peer(peer)
        self._schedule_identify(peer, reason="connect")

    def admit_own(self, peer: ID, addresses: Iterable[Multiaddr]) -> list[Multiaddr]:
        """Return the addresses that a connected peer may name for itself."""
        admitted = self.door.admit(key_of(peer) or b"", map(str, addresses), self.swarm.teller(peer))
        return [Multiaddr(each) for each in admitted]

    def keep_addresses(
        self, peer: ID, addresses: Iterable[Multiaddr | str], teller: Teller, *, seconds: int
    ) -> list[str]:
        """Store the addresses of a peer that its teller may name; return those."""
        public = key_of(peer)
        if public is None:
            return []
        admitted = self.door.admit(public, map(str, addresses), teller)
        self.swarm.store.keep(peer, [Multiaddr(each) for each in admitted], seconds)
        return admitted

    def get_addrs(self) -> list[Multiaddr]:
        """Return the advertised addresses; the library's own cuts a circuit to its relay."""
        chosen = self._advertised(self.get_transport_addrs())
        whole = (multiaddrs.to(each, self.get_id()) for each in chosen)
        return [each for each in whole if each is not None]

    def addresses_of(self, peer: ID) -> list[Multiaddr]:
        """Return the known addresses of a peer."""
        return self.peerstore.addrs(peer)

    def speaks(self, peer: ID, protocol: str) -> bool:
        """Return whether a peer advertises a protocol."""
        return protocol in self.peerstore.get_protocols(peer)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        peer = net_stream.muxed_conn.peer_id
        public = key_of(peer)
        if public is None or self.scores.is_muted(public) or self._open[peer] >= STREAMS_PER_PEER:
            self.counts["streams refused"] += 1
            await net_stream.reset()
            return
        self._open[peer] += 1
        try:
            with boundary(StreamError, f"a stream of {peer}"):
                await self._stream_rate(peer).wait()
                await super()._swarm_stream_handler(net_stream)
        except (EchoError, ExceptionGroup) as error:
            self.counts["contained"] += 1
            _log.info("%s on %s", error, net_stream.get_protocol())
            self.scores.fault(public, "broken-stream")
            await net_stream.reset()
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

    def _stream_rate(self, peer: ID) -> TokenBucket:
        if peer not in self._stream_rates:
            for gone in [each for each in self._stream_rates if each not in self.swarm.connections]:
                del self._stream_rates[gone]
            self._stream_rates[peer] = TokenBucket(STREAMS_PER_SECOND, STREAMS_BURST)
        return self._stream_rates[peer]

    def _on_notifee_disconnected(self, conn: INetConn) -> None:
        super()._on_notifee_disconnected(conn)
        violation, public = getattr(conn.muxed_conn, "violation", ""), key_of(conn.muxed_conn.peer_id)
        if violation and public:
            _log.info("connection of %s broken: %s", conn.muxed_conn.peer_id, violation)
            self.scores.fault(public, "broken-connection")

    def _has_cached_protocols(self, peer_id: ID) -> bool:
        """Return whether the peer was identified on a connection that is still open."""
        return peer_id in self._identified_peers

    async def _identify_task_entry(self, peer_id: ID, reason: str) -> None:
        try:
            with boundary(StreamError, f"identifying {peer_id}"), trio.move_on_after(HANDSHAKE_SECONDS):
                await super()._identify_task_entry(peer_id, reason)
                await self._notify_identified(peer_id)
        except (EchoError, ExceptionGroup) as error:
            self.counts["contained"] += 1
            _log.debug("%s", error)

    async def _identify_peer(self, peer_id: ID, *, reason: str) -> None:
        """Run identify; the library's own reads without bound when the length is missing."""
        if not self.swarm.get_connections(peer_id):
            return
        try:
            stream = await self.new_stream(peer_id, [IDENTIFY])
        except (StreamFailure, SwarmException, *ENDED) as error:
            _log.debug("identify of %s failed (%s): %r", peer_id, reason, error)
            return
        if await self._read_identify(peer_id, stream) and self.swarm.get_connections(peer_id):
            self._identified_peers[peer_id] = reason

    async def _handle_push(self, stream: INetStream) -> None:
        """Handle identify-push: a peer's protocols or addresses changed."""
        peer = stream.muxed_conn.peer_id
        if await self._read_identify(peer, stream):
            await self._notify_identified(peer)

    async def _notify_identified(self, peer: ID) -> None:
        for handler in self._on_identified:
            await handler(peer)

    async def _read_identify(self, peer: ID, stream: INetStream) -> bool:
        try:
            await store_identify(self.peerstore, peer, await read_identify(stream))
        except IdentifyError as error:
            if public := key_of(peer):
                self.scores.fault(public, error.reason)
        except ENDED as error:
            _log.debug("identify of %s ended early: %r", peer, error)
        else:
            await stream.close()
            return True
        await stream.reset()
        return False


def build_host(
    identity: Identity, *, connections: int = CONNECTIONS, per_address: int | None = None
) -> HardHost:
    """Build a host of this identity that does not listen yet.

    `per_address` bounds the inbound connections of strangers from one address.
    """
    libp2p_patches.harden()
    keys = _key_pair(identity)
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    upgrader = TransportUpgrader(
        secure_transports_by_protocol={NOISE: noise}, muxer_transports_by_protocol={TProtocol(YAMUX): Yamux}
    )
    me = id_of(identity.public)

    def admit_own(peer: ID, addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
        return host.admit_own(peer, addresses)

    store = BoundedPeerStore(lambda peer: peer == me or peer in swarm.connections, admit_own)
    config = ConnectionConfig(
        max_connections=connections + PENDING_HANDSHAKES,
        min_connections=0,
        low_watermark=0,  # the dialer decides whom to dial
        high_watermark=connections + PENDING_HANDSHAKES,
        max_connections_per_peer=CONNECTIONS_PER_PEER,
        auto_connect_interval=3600.0,
    )
    scores = PeerScores()
    places = ConnectionManager(
        connections - connections // OUTBOUND_SHARE,
        trio.current_time,
        scores.last_credit,
        per_address=per_address,
    )
    swarm = HardSwarm(me, store, upgrader, config, door=AddressDoor(), places=places)
    store.add_key_pair(me, keys)
    host = HardHost(swarm, scores)
    return host


@asynccontextmanager
async def running(host: HardHost, listen: Sequence[str]) -> AsyncGenerator[None]:
    """Run the host on these listen addresses; close its connections on exit."""
    with boundary(ConfigError, "the addresses to listen on", advice="one looks like /ip4/0.0.0.0/tcp/4001"):
        wanted = [Multiaddr(each) for each in listen]
    for each in wanted:
        _check_free(each)
    async with host.run(wanted):
        if wanted and not host.get_network().listeners:
            raise ConfigError(f"cannot listen on {', '.join(listen)}", advice=_PORT_TAKEN)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(HANDSHAKE_SECONDS):
                await host.close()


def _check_free(address: Multiaddr) -> None:
    """Refuse an address in use or a name.

    The library listens on all interfaces for a name, and shares a port with another node, so that
    each gets some of the connections.
    """
    found = re.fullmatch(r"/ip([46])/([^/]+)/tcp/(\d+)", str(address))
    if found is None:
        raise ConfigError(f"cannot listen on {address}", advice="one looks like /ip4/0.0.0.0/tcp/4001")
    family = socket.AF_INET if found[1] == "4" else socket.AF_INET6
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((found[2], int(found[3])))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}",
                advice=_ADVICE.get(error.errno or 0, _PORT_TAKEN),
            ) from None


def _key_pair(identity: Identity) -> KeyPair:
    private = Ed25519PrivateKey.new(identity.seed)
    return KeyPair(private, private.get_public_key())
