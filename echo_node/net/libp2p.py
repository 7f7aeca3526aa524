"""The `Network` over libp2p: one host with gossip, DHT, requests and their tasks.

async with join_swarm(identity, SwarmSettings(seeds=(...,))) as network: ...
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
)
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import INetConn
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from echo_node.errors import DefectError, StoreError
from echo_node.net.base import (
    ACCEPTED_SECONDS,
    CAPACITY,
    LOOKUP_SECONDS,
    Failure,
    Handler,
    Message,
    Mute,
    PeerEvent,
    RequestError,
    Validator,
)
from echo_node.net.blobs.bulk_server import BulkPort, open_port
from echo_node.net.dht.kademlia import Dht
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.connection_events import watch_connections
from echo_node.net.discovery.dialer import Dialer
from echo_node.net.discovery.mdns import MdnsDiscovery
from echo_node.net.discovery.seeds import parse_seeds, parse_valid_seeds
from echo_node.net.discovery.version_check import VersionCheck
from echo_node.net.gossip.router import Gossip
from echo_node.net.handler_guard import check_bytes, check_name
from echo_node.net.host import ADDRESS_SECONDS, HardHost, build_host, running
from echo_node.net.reachability.reachability import Reachability
from echo_node.net.request_response import RequestResponse
from echo_node.net.subscription import Subscription
from echo_node.net.swarm import BROKEN, id_of, key_of, remote_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity, limits, peer_id, topics

GONE: Final = "this node has left the network"
DIAL_SECONDS: Final = 10.0
FOUND_SECONDS: Final = 5.0
"""Seconds in which a provider must answer a dial to count as found."""
PROVIDER_DIALS: Final = 16
"""Concurrent dials of providers."""
SPARE: Final = 8
"""Providers taken from one reply beyond those wanted: one liar must not use up the time."""
_HOST_AND_PORT: Final = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)")
LAST_PORT: Final = 65_535
BULK_TRIES: Final = 3
"""Free ports to try, as one may be taken on another of several hosts."""
_log = logging.getLogger("echo_node.net")


@dataclass(eq=False, slots=True)
class _Call:
    """A request under way."""

    peer: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    broken: RequestError | None = None

    def break_off(self, reason: Failure, what: str) -> None:
        self.broken = RequestError(reason, what)
        self.scope.cancel()


class Libp2pNetwork:
    """One node in a swarm of libp2p hosts."""

    def __init__(self, host: HardHost, public: bytes, settings: SwarmSettings, book: AddressBook) -> None:
        self._host = host
        self._public = public
        self._counts = host.counts
        self._scores = host.scores
        self._gossip = Gossip(host, self._scores, self._counts)
        self._requests = RequestResponse(host, self._counts)
        self._reachability = Reachability(
            host, relay=settings.relay, public=settings.public, announce=settings.announced()
        )
        lan = (
            MdnsDiscovery(public, lambda: [str(each) for each in host.get_transport_addrs()])
            if settings.lan
            else None
        )
        self._dialer = Dialer(
            host,
            seeds=parse_seeds(settings.seeds),
            run_seeds=parse_valid_seeds(settings.run_seeds),
            book=book,
            lan=lan,
            wanted=settings.wanted,
            most=settings.wanted,
            requests=self._requests,
        )
        self._dht = Dht(host, self._scores, self._counts, self._dialer.suggest)
        self._version_check = VersionCheck()
        self._watchers: list[Subscription[PeerEvent]] = []
        self._calls: set[_Call] = set()
        self._connected: set[bytes] = set()
        self._joined = True
        self._nursery: trio.Nursery | None = None
        self.bulk: BulkPort | None = None
        host.on_identified(self._identified)

    @property
    def public(self) -> bytes:
        return self._public

    @property
    def host(self) -> HardHost:
        """The libp2p host."""
        return self._host

    @property
    def addresses(self) -> list[str]:
        """Advertised addresses, each with the peer id."""
        return [str(each) for each in self._host.get_addrs()]

    @property
    def reachability(self) -> Reachability:
        """Return whether and how others can dial this node."""
        return self._reachability

    def known(self) -> Mapping[bytes, Sequence[str]]:
        """Return every known peer, connected or not, and its addresses."""
        table = {key_of(peer): tuple(map(str, ways)) for peer, ways in self._dht.known().items()}
        return {public: ways for public, ways in table.items() if public} | dict(self._dialer.known())

    # Gossip

    async def publish(self, topic: str, data: bytes) -> None:
        check_name(topic, "a topic")
        check_bytes(data, "gossip")
        self._check_joined()
        if len(data) > limits.GOSSIP_BYTES:
            raise DefectError(f"gossip of {len(data)} bytes, at most {limits.GOSSIP_BYTES} are allowed")
        await self._gossip.publish(topic, data)

    def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AbstractAsyncContextManager[Subscription[Message]]:
        check_name(topic, "a topic")
        self._check_joined()
        return self._gossip.subscribe(topic, validator, capacity=capacity)

    # Requests

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        check_bytes(data, "a request")
        check_name(stream, "a stream")
        if not 0 < deadline < math.inf:
            raise DefectError(f"a request with a deadline of {deadline} s: give a finite one above 0")
        self._check_joined()
        call = _Call(peer)
        self._calls.add(call)
        try:
            with trio.move_on_after(deadline), call.scope:
                await self._connect(peer)
                return await self._requests.request(peer, stream, data, most)
        except RequestError as error:
            raise call.broken or error from None
        finally:
            self._calls.discard(call)
        raise call.broken or RequestError(
            "deadline", f"{peer_id(peer)} did not answer on {stream} within {deadline:g} s (deadline)"
        )

    def serve(self, stream: str, handler: Handler, *, most: int) -> AbstractContextManager[None]:
        check_name(stream, "a stream")
        self._check_joined()
        return self._requests.serve(stream, handler, most=most)

    # The DHT

    async def provide(self, key: bytes, *, deadline: float = LOOKUP_SECONDS) -> None:
        check_bytes(key, "a key of the DHT")
        self._check_joined()
        with trio.move_on_after(deadline):
            while not await self._dht.provide(key) and self._dialer.has_candidates:
                await self._dht.wait_for_peers()

    def withdraw(self, key: bytes) -> None:
        self._dht.withdraw(key)

    async def find(self, key: bytes, count: int, *, deadline: float = LOOKUP_SECONDS) -> list[bytes]:
        check_bytes(key, "a key of the DHT")
        self._check_joined()
        found: list[bytes] = []
        tried: set[bytes] = set()
        limit = trio.CapacityLimiter(PROVIDER_DIALS)
        with trio.move_on_after(deadline if count > 0 else 0):
            async with trio.open_nursery() as nursery:

                def dial_once(peer: bytes, addresses: tuple[Multiaddr, ...]) -> None:
                    if peer not in tried:
                        tried.add(peer)
                        nursery.start_soon(dial, peer, addresses)

                async def dial(peer: bytes, addresses: tuple[Multiaddr, ...]) -> None:
                    async with limit:
                        if await self._dial_provider(peer, addresses):
                            found.append(peer)
                    if len(found) >= count:
                        nursery.cancel_scope.cancel()

                await self._dht.find(key, dial_once, each=count + SPARE)
        return found[: max(0, count)]

    # Peers

    def peers(self) -> frozenset[bytes]:
        return frozenset(self._connected) if self._joined else frozenset()

    def address(self, peer: bytes) -> str | None:
        for connection in self._host.direct(id_of(peer)):
            if remote := remote_of(connection):
                return remote[0]
        return None

    def protect(self, peer: bytes, seconds: float = ACCEPTED_SECONDS) -> None:
        self._host.swarm.places.protect(peer, seconds)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[Subscription[PeerEvent]]:
        self._check_joined()
        inbox: Subscription[PeerEvent] = Subscription(CAPACITY)
        self._watchers.append(inbox)
        try:
            await trio.lowlevel.checkpoint()
            yield inbox
        finally:
            self._watchers.remove(inbox)
            inbox.close()

    def score(self, peer: bytes, reason: str) -> None:
        self._scores.fault(peer, reason)

    def scores(self) -> Mapping[bytes, Mapping[str, int]]:
        return self._scores.scores()

    def mutes(self) -> Mapping[bytes, Mute]:
        return self._scores.mutes()

    def counts(self) -> Mapping[str, int]:
        bulk = self.bulk.counts if self.bulk else {}
        return {**self._counts, **{f"bulk {outcome}": count for outcome, count in bulk.items()}}

    # Life cycle

    async def run(self) -> None:
        """Run the background tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for peer in self._connected:
                self._gossip_with(peer)
            nursery.start_soon(self._gossip.run)
            nursery.start_soon(self._dht.run)
            nursery.start_soon(self._reachability.run)
            nursery.start_soon(self._dialer.run)

    def end(self) -> None:
        """Leave the network: end subscriptions and requests."""
        self._joined = False
        self._gossip.end(GONE)
        for watcher in self._watchers:
            watcher.end(GONE)
        for call in tuple(self._calls):
            call.break_off("left", GONE)

    def _check_joined(self) -> None:
        if not self._joined:
            raise RequestError("left", GONE)

    def on_connected(self, peer: bytes, _connection: INetConn) -> None:
        """Record a new connection."""
        if self._joined and peer not in self._connected:
            self._connected.add(peer)
            self._notify(PeerEvent(peer, joined=True))
            self._gossip_with(peer)

    def on_disconnected(self, peer: bytes) -> None:
        """Record that the last connection to a peer has ended."""
        self._connected.discard(peer)
        if self._joined:
            self._notify(PeerEvent(peer, joined=False))

    def _gossip_with(self, peer: bytes) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._gossip.serve_peer, peer, lambda: peer in self._connected)

    def _notify(self, event: PeerEvent) -> None:
        for watcher in self._watchers:
            watcher.put(event)

    async def _identified(self, peer: ID) -> None:
        public = key_of(peer)
        if public is not None and self._version_check.check(
            public, self._host.get_peerstore().get_protocols(peer)
        ):
            self._counts["of another major version"] += 1
        if self._host.speaks(peer, topics.KAD_PROTOCOL):
            await self._dht.add(peer, self._host.addresses_of(peer))

    async def _connect(self, peer: bytes) -> None:
        """Connect to a peer. Raises `RequestError`."""
        if peer == self._public:
            raise RequestError("unknown-peer", "unknown peer: this node itself")
        if peer in self._connected:
            return
        if not (self._host.addresses_of(id_of(peer)) or await self._dht.find_peer(peer)):
            raise RequestError("unknown-peer", f"no address of {peer_id(peer)} is known")
        try:
            with trio.fail_after(DIAL_SECONDS):
                await self._host.connect_known(id_of(peer))
        except BROKEN as error:
            raise RequestError("unreachable", f"{peer_id(peer)} cannot be dialled: {error}") from error

    async def _dial_provider(self, peer: bytes, addresses: tuple[Multiaddr, ...]) -> bool:
        """Return whether an announced provider can be dialled at its admitted addresses."""
        try:
            if peer not in self._connected:
                self._host.swarm.store.keep(id_of(peer), addresses, ADDRESS_SECONDS)
                with trio.fail_after(FOUND_SECONDS):
                    await self._host.connect_known(id_of(peer))
        except BROKEN as error:
            _log.debug("provider %s cannot be dialled: %r", peer_id(peer), error)
            return False
        return True


async def _open_bulk(network: Libp2pNetwork, settings: SwarmSettings, stack: AsyncExitStack) -> None:
    """Open the bulk port on libp2p's listen hosts; without it, streams carry all."""
    found = [_HOST_AND_PORT.fullmatch(each) for each in settings.listen]
    hosts = tuple(dict.fromkeys(each[1] for each in found if each))
    if not hosts:
        return  # a node that only dials serves nobody directly
    fixed = next((int(each[2]) for each in found if each and int(each[2])), 0)
    beside = (fixed + 1,) if 0 < fixed < LAST_PORT else ()
    ports = (settings.bulk_port,) if settings.bulk_port else (*beside, *(0,) * BULK_TRIES)
    try:
        network.bulk = await stack.enter_async_context(open_port(network, hosts, ports=ports))
    except StoreError as error:
        _log.warning("%s; large blobs go over libp2p streams, which are slower", error)


@asynccontextmanager
async def join_swarm(identity: Identity, settings: SwarmSettings) -> AsyncGenerator[Libp2pNetwork]:
    """Join the swarm with this key until the context is left."""
    host = build_host(identity, connections=settings.connections, per_address=settings.per_address)
    failed: BaseException | None = None
    try:
        async with AsyncExitStack() as stack:
            book = stack.enter_context(closing(AddressBook(settings.book)))
            network = Libp2pNetwork(host, identity.public, settings, book)
            stack.enter_context(watch_connections(host, network.on_connected, network.on_disconnected))
            await stack.enter_async_context(running(host, settings.listen))
            if settings.bulk:
                await _open_bulk(network, settings, stack)
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(network.run)
            try:
                yield network
            except BaseException as error:
                failed = error
                raise
            finally:
                network.end()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if failed is not None and group.subgroup(lambda error: error is failed) is not None:
            raise failed from None  # the block's own error, without the nurseries' groups
        raise
