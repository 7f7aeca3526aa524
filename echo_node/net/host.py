"""A libp2p host that holds up: TCP, Noise and Yamux, nothing else; every bound set; every stream contained.

What py-libp2p lets one hand in is handed in here as a subclass; what it does not is patched in `hardening`. It knows
peers, streams and addresses, and nothing of gossip, of the DHT or of what the streams carry.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream, IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from echo_node.errors import ConfigError, EchoError, PeerError, boundary
from echo_node.net import hardening
from echo_node.net.identify import (
    ENDED,
    IDENTIFY,
    PING,
    PUSH,
    IntroductionError,
    answer_pings,
    keep,
    read_introduction,
)
from echo_node.net.muxing.yamux import PROTOCOL_ID as YAMUX
from echo_node.net.muxing.yamux import Yamux
from echo_node.net.noise import NoiseTransport
from echo_node.net.pace import Pace
from echo_node.net.peerstore import BoundedPeerStore
from echo_node.net.reaching import addresses
from echo_node.net.reaching.circuit import Circuits
from protocol import Identity
from protocol.identity import PEER_ID_BYTES, peer_id_bytes

CONNECTIONS: Final = 300
CONNECTIONS_PER_PEER: Final = 3
STREAMS_PER_PEER: Final = 64
"""Streams of one peer that are open towards us at once; more are reset."""
STREAMS_PER_SECOND: Final = 200
"""That one peer opens, in the long run; beyond that they wait for their turn, and then there are too many."""
STREAMS_BURST: Final = 1_000
STRANGERS: Final = 64
"""Inbound connections that have not shown who they are; one more ends the oldest of the address with the most."""
OWN_SHARE: Final = 6
"""One in so many connections is kept for those that this node dials."""
HANDSHAKE_SECONDS: Final = 10
HAPPY_EYEBALLS_SECONDS: Final = 0.25
ADDRESSES_TO_DIAL: Final = 8
ADDRESS_SECONDS: Final = 120
"""For which an address that was tried is known, unless the peer itself says that it has it."""
_log = logging.getLogger("echo_node.net.host")
_TAKEN: Final = "another program may use the port; give another one, or 0 for any"
_WHY_NOT: Final = {
    errno.EACCES: "low ports are the system's own; give one from 1024 on, or 0 for any",
    errno.EADDRNOTAVAIL: "that is none of this machine's addresses; /ip4/0.0.0.0 is all of them",
}


class StreamError(EchoError):
    """A stream whose handler did not expect what came."""


class DialError(PeerError):
    """An address at which nobody answered, or not as a peer does."""


def id_of(public: bytes) -> ID:
    """libp2p's name for a key."""
    return ID(peer_id_bytes(public))


def key_of(peer: ID) -> bytes | None:
    """The Ed25519 key that a peer id holds; None for other kinds of key, which have no place here."""
    binary = peer.to_bytes()
    return binary[-32:] if len(binary) == PEER_ID_BYTES and binary == peer_id_bytes(binary[-32:]) else None


class _NoAutoConnector(AutoConnector):
    """Dials nobody by itself: the library's would dial half the bound of connections from hearsay."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:  # noqa: ARG002 - the library's signature
        await trio.lowlevel.checkpoint()

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        """Nothing: the library's keeps everyone who ever left."""


@dataclass(eq=False, slots=True)
class _Stranger:
    """An inbound connection during its handshake."""

    ip: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class HardSwarm(Swarm):
    """Dials every address that a peer is known by, and forgets inbound connections when they end."""

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _NoAutoConnector(swarm=self)
        most = self.connection_config.max_connections
        self._inbound_limiter = trio.CapacityLimiter(max(1, most - most // OWN_SHARE))
        self._strangers: list[_Stranger] = []

    def get_connections(self, peer_id: ID | None = None) -> list[INetConn]:
        """Those that stand. The library's own has some that are closed, and opens streams on them."""
        return [conn for conn in super().get_connections(peer_id) if not conn.is_closed]

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """A connection to the peer: one that is there, or the first of its addresses that answers."""
        if live := self.get_connections(peer_id):
            return live
        if peer_id in self._ongoing_dials:
            await self._ongoing_dials[peer_id].wait()
            if live := self.get_connections(peer_id):
                return live
            raise SwarmException(f"the dial of {peer_id} that was under way failed")
        return [await self._dial_once(peer_id, self._addresses(peer_id))]

    async def dial_direct(self, peer_id: ID, hints: Sequence[Multiaddr] = ()) -> INetConn:
        """A connection that goes through nobody else. The hints are tried first, and not remembered."""
        if peer_id in self._ongoing_dials and not self.direct(peer_id):
            await self._ongoing_dials[peer_id].wait()
        if live := self.direct(peer_id):
            return live[0]
        known = [*hints, *self._usable(peer_id)]
        direct = [each for each in known if not addresses.is_circuit(each)][:ADDRESSES_TO_DIAL]
        if not direct or peer_id in self._ongoing_dials:
            raise SwarmException(f"no address of {peer_id} that could be dialled directly")
        return await self._dial_once(peer_id, direct)

    def direct(self, peer_id: ID) -> list[INetConn]:
        """The connections to the peer that go through nobody else."""
        conns = self.get_connections(peer_id)
        return [conn for conn in conns if conn.get_connection_type() is not ConnectionType.RELAYED]

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
            raise SwarmException(f"no address of {peer_id} that could be dialled")
        # a way of our own before a way through others, which has its turn however many there are of the first kind
        direct = [each for each in usable if not addresses.is_circuit(each)]
        circuits = [each for each in usable if addresses.is_circuit(each)]
        return [*direct[: ADDRESSES_TO_DIAL - min(2, len(circuits))], *circuits][:ADDRESSES_TO_DIAL]

    def _usable(self, peer_id: ID) -> list[Multiaddr]:
        known = self.peerstore.addrs(peer_id)
        whole = [each for each in (addresses.to(each, peer_id) for each in known) if each is not None]
        unique = {str(each): each for each in whole}
        return [each for each in unique.values() if self.transport_manager.transport_for_dialing(each)]

    async def _dial_first(self, peer_id: ID, to: Sequence[Multiaddr]) -> INetConn:
        found: list[INetConn] = []
        errors: list[str] = []

        async def dial(address: Multiaddr, failed: trio.Event) -> None:
            try:
                # the dial of a relay waits in the line by itself: the circuit must not hold a place there for it
                async with nullcontext() if addresses.is_circuit(address) else self._global_dial_limiter:
                    # the library lets out whatever a peer can make Noise raise
                    with (
                        boundary(DialError, str(address)),
                        trio.fail_after(self.connection_config.dial_timeout),
                    ):
                        found.append(await self._dial_addr_single_attempt(address, peer_id))
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
        """Take a connection in, and return when it has ended: the caller holds an inbound slot until then."""
        remote = raw_conn.get_remote_address()
        stranger = _Stranger(remote[0] if remote else "")
        if len(self._strangers) >= STRANGERS:
            crowd = Counter(each.ip for each in self._strangers).most_common(1)[0][0]
            next(each for each in self._strangers if each.ip == crowd).scope.cancel()
        self._strangers.append(stranger)
        try:
            with stranger.scope:
                muxed = await super().upgrade_inbound_raw_conn(raw_conn, maddr)
        finally:
            self._strangers.remove(stranger)
        if stranger.scope.cancelled_caught:
            raise SwarmException("it did not show who it is, and others wait")
        await muxed.event_closed.wait()  # type: ignore[attr-defined]
        raise SwarmException("the connection has ended")

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Only peers with Ed25519 keys have a name here; the library would keep the others for nothing."""
        if key_of(muxed_conn.peer_id) is None:
            await muxed_conn.close()
            raise SwarmException(f"{muxed_conn.peer_id} has a kind of key that has no place here")
        return await super().add_conn(muxed_conn, direction)

    async def close(self) -> None:
        """Close all connections at once: the library takes 0.1 s for each, one after the other."""
        async with trio.open_nursery() as nursery:
            for connection in self.get_connections():
                nursery.start_soon(self._close_connection_async, connection)
        await super().close()


class HardHost(BasicHost):
    """A host on which nothing that a peer sends, and no bug in a handler, reaches further than its stream."""

    def __init__(self, network: HardSwarm) -> None:
        self.swarm = network
        self.advertise: Callable[[list[Multiaddr]], list[Multiaddr]] = list
        """From the addresses that it listens on to those that others are told. `reach` sets it."""
        super().__init__(network)
        self.counts: Counter[str] = Counter()
        self.fault: Callable[[bytes, str], None] = lambda _public, _reason: None
        """Told of peers that broke a stream. The network sets it."""
        self.welcome: Callable[[bytes], bool] = lambda _public: True
        """Asked whether a peer may open a stream now. The network sets it."""
        self.identified: Callable[[ID], Awaitable[None]] = _nothing
        """Told when a peer has said which protocols and addresses it has. The network sets it."""
        self._open: Counter[ID] = Counter()
        self._paces: dict[ID, Pace] = {}
        self.set_stream_handler(PUSH, self._take_push)
        self.set_stream_handler(PING, answer_pings)
        self.circuits = Circuits(self)
        network.transport_manager.add_transport(self.circuits)

    def direct(self, peer: ID) -> list[INetConn]:
        """The connections to a peer that go through nobody else."""
        return self.swarm.direct(peer)

    def is_relayed(self, peer: ID) -> bool:
        """Whether the peer is connected, and through relays alone: no place for bulk."""
        return not self.direct(peer) and bool(self.swarm.get_connections(peer))

    async def connect(self, peer_info: PeerInfo) -> None:
        """Have a connection to a peer. The library's own is content with one that is closed."""
        self.peerstore.add_addrs(peer_info.peer_id, peer_info.addrs, ADDRESS_SECONDS)
        await self.swarm.dial_peer(peer_info.peer_id)
        self._schedule_identify(peer_info.peer_id, reason="connect")

    def get_addrs(self) -> list[Multiaddr]:
        """What others are told. The library's own cuts a circuit down to the relay's address."""
        whole = (addresses.to(each, self.get_id()) for each in self.advertise(self.get_transport_addrs()))
        return [each for each in whole if each is not None]

    def addresses_of(self, peer: ID) -> list[Multiaddr]:
        """Where a peer can be dialled, as far as this node has heard."""
        return self.peerstore.addrs(peer)

    def speaks(self, peer: ID, protocol: str) -> bool:
        """Whether a peer has said that it speaks a protocol."""
        return protocol in self.peerstore.get_protocols(peer)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        peer = net_stream.muxed_conn.peer_id
        public = key_of(peer)
        if public is None or not self.welcome(public) or self._open[peer] >= STREAMS_PER_PEER:
            self.counts["streams refused"] += 1
            await net_stream.reset()
            return
        self._open[peer] += 1
        try:
            with boundary(StreamError, f"a stream of {peer}"):
                await self._pace(peer).wait()
                await super()._swarm_stream_handler(net_stream)
        except (EchoError, ExceptionGroup) as error:
            self.counts["contained"] += 1
            _log.info("%s on %s", error, net_stream.get_protocol())
            self.fault(public, "broken-stream")
            await net_stream.reset()
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

    def _pace(self, peer: ID) -> Pace:
        if peer not in self._paces:
            for gone in [each for each in self._paces if each not in self.swarm.connections]:
                del self._paces[gone]
            self._paces[peer] = Pace(STREAMS_PER_SECOND, STREAMS_BURST)
        return self._paces[peer]

    def _on_notifee_disconnected(self, conn: INetConn) -> None:
        super()._on_notifee_disconnected(conn)
        violation, public = getattr(conn.muxed_conn, "violation", ""), key_of(conn.muxed_conn.peer_id)
        if violation and public:
            _log.info("%s broke its connection: %s", conn.muxed_conn.peer_id, violation)
            self.fault(public, "broken-connection")

    def _has_cached_protocols(self, peer_id: ID) -> bool:
        """Only what was said on a connection that is open now counts."""
        return peer_id in self._identified_peers

    async def _identify_task_entry(self, peer_id: ID, reason: str) -> None:
        try:
            with boundary(StreamError, f"identifying {peer_id}"), trio.move_on_after(HANDSHAKE_SECONDS):
                await super()._identify_task_entry(peer_id, reason)
                await self.identified(peer_id)
        except (EchoError, ExceptionGroup) as error:
            self.counts["contained"] += 1
            _log.debug("%s", error)

    async def _identify_peer(self, peer_id: ID, *, reason: str) -> None:
        """Ask a peer who it is. The library's own reads without bound where the peer leaves out the length."""
        if not self.swarm.get_connections(peer_id):
            return
        try:
            stream = await self.new_stream(peer_id, [IDENTIFY])
        except (StreamFailure, SwarmException, *ENDED) as error:
            _log.debug("%s does not say who it is (%s): %r", peer_id, reason, error)
            return
        if await self._introduce(peer_id, stream) and self.swarm.get_connections(peer_id):
            self._identified_peers[peer_id] = reason

    async def _take_push(self, stream: INetStream) -> None:
        """A peer says that something about it has changed."""
        peer = stream.muxed_conn.peer_id
        if await self._introduce(peer, stream):
            await self.identified(peer)

    async def _introduce(self, peer: ID, stream: INetStream) -> bool:
        try:
            await keep(self.peerstore, peer, await read_introduction(stream))
        except IntroductionError as error:
            if public := key_of(peer):
                self.fault(public, error.reason)
        except ENDED as error:
            _log.debug("%s stopped saying who it is: %r", peer, error)
        else:
            await stream.close()
            return True
        await stream.reset()
        return False


def build_host(identity: Identity, *, connections: int = CONNECTIONS) -> HardHost:
    """A host of this identity that does not listen yet."""
    hardening.harden()
    keys = _key_pair(identity)
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    upgrader = TransportUpgrader(
        secure_transports_by_protocol={NOISE: noise}, muxer_transports_by_protocol={TProtocol(YAMUX): Yamux}
    )
    store = BoundedPeerStore()
    me = id_of(identity.public)
    store.add_key_pair(me, keys)
    config = ConnectionConfig(
        max_connections=connections,
        min_connections=0,
        low_watermark=0,  # who is dialled is for `discovery` to say
        high_watermark=connections,
        max_connections_per_peer=CONNECTIONS_PER_PEER,
        auto_connect_interval=3600.0,
    )
    swarm = HardSwarm(
        me,
        store,
        upgrader,
        transports=[TCP()],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
    )
    store.stays = lambda peer: peer == me or peer in swarm.connections
    return HardHost(swarm)


@asynccontextmanager
async def running(host: HardHost, listen: Sequence[str]) -> AsyncGenerator[None]:
    """The host, listening on these addresses, until the context is left; its connections are closed then."""
    with boundary(ConfigError, "the addresses to listen on", advice="one looks like /ip4/0.0.0.0/tcp/4001"):
        wanted = [Multiaddr(each) for each in listen]
    for each in wanted:
        _check_free(each)
    async with host.run(wanted):
        if wanted and not host.get_network().listeners:
            raise ConfigError(f"cannot listen on {', '.join(listen)}", advice=_TAKEN)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(HANDSHAKE_SECONDS):
                await host.close()


def _check_free(address: Multiaddr) -> None:
    """The library would listen everywhere for a name, and beside another node on one port, of whose callers each gets some."""
    found = re.fullmatch(r"/ip([46])/([^/]+)/tcp/(\d+)", str(address))
    if found is None:
        raise ConfigError(f"cannot listen on {address}", advice="one looks like /ip4/0.0.0.0/tcp/4001")
    family = socket.AF_INET if found[1] == "4" else socket.AF_INET6
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            tried.bind((found[2], int(found[3])))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}",
                advice=_WHY_NOT.get(error.errno or 0, _TAKEN),
            ) from None


async def _nothing(_peer: ID) -> None:
    await trio.lowlevel.checkpoint()


def _key_pair(identity: Identity) -> KeyPair:
    private = Ed25519PrivateKey.new(identity.seed)
    return KeyPair(private, private.get_public_key())
