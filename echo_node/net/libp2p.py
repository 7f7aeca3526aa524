"""The network over real libp2p: one host with gossip, a DHT and questions, and the tasks that keep it going.

    async with join_swarm(identity, SwarmSettings(seeds=(...,))) as network: ...

It puts the parts together and keeps count of who is connected; what each part does is in its own file. It knows
nothing of runs, roles or what the bytes mean.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trio
from libp2p.abc import INetConn
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.errors import ConfigError, DefectError, boundary
from echo_node.net.asking import Asking
from echo_node.net.base import (
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
from echo_node.net.broken import BROKEN
from echo_node.net.gossip.node import Gossip
from echo_node.net.guard import check_bytes, check_name
from echo_node.net.host import HardHost, build_host, id_of, key_of, running
from echo_node.net.inbox import Inbox
from echo_node.net.kad.dht import Dht
from echo_node.net.meeting.comings import remote_of, watching
from echo_node.net.meeting.discovery import Discovery
from echo_node.net.meeting.lan import Lan
from echo_node.net.meeting.majors import Majors
from echo_node.net.meeting.peerbook import PeerBook
from echo_node.net.meeting.places import Scope, scope
from echo_node.net.meeting.seeds import parse_seeds
from echo_node.net.reaching.reach import Reach
from echo_node.net.standing import Standing
from protocol import Identity, limits, peer_id, topics

GONE: Final = "this node has left the network"
ADDRESS_ADVICE: Final = "one looks like /ip4/192.0.2.7/tcp/4001"
SEED_CONNECTIONS: Final = 600
DIAL_SECONDS: Final = 10.0
FOUND_SECONDS: Final = 5.0
"""In which somebody that was found must answer a dial, to count as found."""
MEETINGS: Final = 16
"""Dials under way at once to those that were found."""
SPARE: Final = 8
"""Providers that are believed from one answer, beyond those that are wanted: one liar must not use up the time."""
_NAMED: Final = re.compile(r"/dns[46]?/[^/]+/tcp/[1-9][0-9]*")
_OWN_PEER: Final = re.compile(r"/p2p/\w+$")
_log = logging.getLogger("echo_node.net")


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """How a node takes part."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    seeds: tuple[str, ...] = ()
    book: Path | None = None
    """Where good peers are remembered across restarts; nowhere if it is None."""
    lan: bool = False
    """Whether to look for peers on the local network."""
    relay: bool = True
    """Whether to carry connections for nodes that cannot be dialled, as long as this one can be."""
    wanted: int = 12
    """Connections that this node makes by itself."""
    connections: int = 300
    public: bool | None = None
    """Whether others can dial this node, if the person knows; it finds out otherwise."""
    announce: tuple[str, ...] = ()
    """Addresses that the person knows others can dial."""

    def of_a_seed(self, *, public: bool | None = True) -> SwarmSettings:
        """The same for a node that others meet at: many find it, and it should be one that can be dialled."""
        return replace(self, connections=SEED_CONNECTIONS, public=public)


def _announced(text: str) -> Multiaddr:
    """An address that others are told, and pass on: one that nobody can dial would be found out by strangers."""
    with boundary(ConfigError, "the addresses to announce", advice=ADDRESS_ADVICE):
        address = Multiaddr(text)
    plain = _OWN_PEER.sub("", str(address))
    if scope(plain) is Scope.NOWHERE and not _NAMED.fullmatch(plain):
        raise ConfigError(f"the address {text!r} to announce cannot be dialled", advice=ADDRESS_ADVICE)
    return address


@dataclass(eq=False, slots=True)
class _Call:
    peer: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    broken: RequestError | None = None

    def break_off(self, reason: Failure, what: str) -> None:
        self.broken = RequestError(reason, what)
        self.scope.cancel()


class Libp2pNetwork:
    """One node's place in a swarm of libp2p hosts."""

    def __init__(self, host: HardHost, public: bytes, settings: SwarmSettings, book: PeerBook) -> None:
        self._host = host
        self._public = public
        self._counts = host.counts
        self._standing = Standing()
        self._gossip = Gossip(host, self._standing, self._counts)
        self._asking = Asking(host, self._counts)
        announce = [_announced(each) for each in settings.announce]
        self._reach = Reach(host, relay=settings.relay, public=settings.public, announce=announce)
        lan = (
            Lan(public, lambda: [str(each) for each in host.get_transport_addrs()]) if settings.lan else None
        )
        self._discovery = Discovery(
            host,
            seeds=parse_seeds(settings.seeds),
            book=book,
            lan=lan,
            wanted=settings.wanted,
            most=settings.wanted,
            asking=self._asking,
        )
        self._dht = Dht(host, self._standing, self._counts, self._discovery.suggest)
        self._majors = Majors()
        self._watchers: list[Inbox[PeerEvent]] = []
        self._calls: set[_Call] = set()
        self._connected: set[bytes] = set()
        self._here = True
        self._nursery: trio.Nursery | None = None
        host.fault = self._standing.fault
        host.welcome = lambda peer: not self._standing.muted(peer)
        host.identified = self._identified

    @property
    def public(self) -> bytes:
        return self._public

    @property
    def host(self) -> HardHost:
        """The libp2p host, for whoever needs what this interface does not have."""
        return self._host

    @property
    def addresses(self) -> list[str]:
        """Where others can reach this node, each with its peer id."""
        return [str(each) for each in self._host.get_addrs()]

    @property
    def reach(self) -> Reach:
        """Whether others can dial this node, and what that means."""
        return self._reach

    def known(self) -> Mapping[bytes, Sequence[str]]:
        """Every peer that this node has heard of, connected or not, and where it might be."""
        table = {key_of(peer): tuple(map(str, ways)) for peer, ways in self._dht.known().items()}
        return {public: ways for public, ways in table.items() if public} | dict(self._discovery.known())

    # Gossip

    async def publish(self, topic: str, data: bytes) -> None:
        check_name(topic, "a topic")
        check_bytes(data, "gossip")
        self._check_here()
        if len(data) > limits.GOSSIP_BYTES:
            raise DefectError(f"gossip of {len(data)} bytes, at most {limits.GOSSIP_BYTES} are allowed")
        await self._gossip.publish(topic, data)

    def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AbstractAsyncContextManager[Inbox[Message]]:
        check_name(topic, "a topic")
        self._check_here()
        return self._gossip.subscribe(topic, validator, capacity=capacity)

    # Questions

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        check_bytes(data, "a question")
        check_name(stream, "a stream")
        if not 0 < deadline < math.inf:
            raise DefectError(f"a request with a deadline of {deadline} s: it needs one above 0 that comes")
        self._check_here()
        call = _Call(peer)
        self._calls.add(call)
        try:
            with trio.move_on_after(deadline), call.scope:
                await self._connect(peer)
                return await self._asking.ask(peer, stream, data, most)
        except RequestError as error:
            raise call.broken or error from None
        finally:
            self._calls.discard(call)
        raise call.broken or RequestError(
            "deadline", f"{peer_id(peer)} did not answer on {stream} within {deadline:g} s (deadline)"
        )

    def serve(self, stream: str, handler: Handler, *, most: int) -> AbstractContextManager[None]:
        check_name(stream, "a stream")
        self._check_here()
        return self._asking.serve(stream, handler, most=most)

    # The DHT

    async def provide(self, key: bytes, *, deadline: float = LOOKUP_SECONDS) -> None:
        check_bytes(key, "a key of the DHT")
        self._check_here()
        with trio.move_on_after(deadline):
            while not await self._dht.provide(key) and self._discovery.hopes:
                await self._dht.wait_for_peers()

    def withdraw(self, key: bytes) -> None:
        self._dht.withdraw(key)

    async def find(self, key: bytes, count: int, *, deadline: float = LOOKUP_SECONDS) -> list[bytes]:
        check_bytes(key, "a key of the DHT")
        self._check_here()
        there: list[bytes] = []
        met: set[bytes] = set()
        places = trio.CapacityLimiter(MEETINGS)
        with trio.move_on_after(deadline if count > 0 else 0):
            async with trio.open_nursery() as nursery:

                def hear(peer: bytes, addresses: tuple[Multiaddr, ...]) -> None:
                    if peer not in met:
                        met.add(peer)
                        nursery.start_soon(meet, peer, addresses)

                async def meet(peer: bytes, addresses: tuple[Multiaddr, ...]) -> None:
                    async with places:
                        if await self._meet(peer, addresses):
                            there.append(peer)
                    if len(there) >= count:
                        nursery.cancel_scope.cancel()

                await self._dht.find(key, hear, each=count + SPARE)
        return there[: max(0, count)]

    # Peers

    def peers(self) -> frozenset[bytes]:
        return frozenset(self._connected) if self._here else frozenset()

    def address(self, peer: bytes) -> str | None:
        for connection in self._host.direct(id_of(peer)):
            if remote := remote_of(connection):
                return remote[0]
        return None

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[Inbox[PeerEvent]]:
        self._check_here()
        inbox: Inbox[PeerEvent] = Inbox(CAPACITY)
        self._watchers.append(inbox)
        try:
            await trio.lowlevel.checkpoint()
            yield inbox
        finally:
            self._watchers.remove(inbox)
            inbox.close()

    def score(self, peer: bytes, reason: str) -> None:
        self._standing.fault(peer, reason)

    def scores(self) -> Mapping[bytes, Mapping[str, int]]:
        return self._standing.scores()

    def mutes(self) -> Mapping[bytes, Mute]:
        return self._standing.mutes()

    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)

    # Its life

    async def run(self) -> None:
        """Whatever goes on by itself, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for peer in self._connected:
                self._talk_to(peer)
            nursery.start_soon(self._gossip.run)
            nursery.start_soon(self._dht.run)
            nursery.start_soon(self._reach.run)
            nursery.start_soon(self._discovery.run)

    def end(self) -> None:
        """This node leaves: end whatever waits on it."""
        self._here = False
        self._gossip.end(GONE)
        for watcher in self._watchers:
            watcher.end(GONE)
        for call in tuple(self._calls):
            call.break_off("left", GONE)

    def _check_here(self) -> None:
        if not self._here:
            raise RequestError("left", GONE)

    def came(self, peer: bytes, _connection: INetConn) -> None:
        """A connection to a peer was made."""
        if self._here and peer not in self._connected:
            self._connected.add(peer)
            self._tell(PeerEvent(peer, joined=True))
            self._talk_to(peer)

    def went(self, peer: bytes) -> None:
        """The last connection to a peer has ended."""
        self._connected.discard(peer)
        if self._here:
            self._tell(PeerEvent(peer, joined=False))

    def _talk_to(self, peer: bytes) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._gossip.talk_to, peer, lambda: peer in self._connected)

    def _tell(self, event: PeerEvent) -> None:
        for watcher in self._watchers:
            watcher.put(event)

    async def _identified(self, peer: ID) -> None:
        public = key_of(peer)
        if public is not None and self._majors.heed(public, self._host.get_peerstore().get_protocols(peer)):
            self._counts["of another major version"] += 1
        if self._host.speaks(peer, topics.KAD_PROTOCOL):
            await self._dht.add(peer, self._host.addresses_of(peer))

    async def _connect(self, peer: bytes) -> None:
        """Have a connection to a peer, or say why not."""
        if peer == self._public:
            raise RequestError("unknown-peer", "unknown peer: this node itself")
        if peer in self._connected:
            return
        addresses = tuple(self._host.addresses_of(id_of(peer))) or await self._dht.find_peer(peer)
        if not addresses:
            raise RequestError("unknown-peer", f"nobody here knows an address of {peer_id(peer)}")
        try:
            with trio.fail_after(DIAL_SECONDS):
                await self._host.connect(PeerInfo(id_of(peer), list(addresses)))
        except BROKEN as error:
            raise RequestError("unreachable", f"{peer_id(peer)} cannot be dialled: {error}") from error

    async def _meet(self, peer: bytes, addresses: tuple[Multiaddr, ...]) -> bool:
        """Whether a peer that was found is there."""
        try:
            if peer not in self._connected:
                with trio.fail_after(FOUND_SECONDS):
                    await self._host.connect(PeerInfo(id_of(peer), list(addresses)))
        except BROKEN as error:
            _log.debug("%s was announced and is not there: %r", peer_id(peer), error)
            return False
        return True


@asynccontextmanager
async def join_swarm(identity: Identity, settings: SwarmSettings) -> AsyncGenerator[Libp2pNetwork]:
    """A node of this key in the swarm, for as long as the context lasts."""
    host = build_host(identity, connections=settings.connections)
    failed: BaseException | None = None
    try:
        async with AsyncExitStack() as stack:
            book = stack.enter_context(closing(PeerBook(settings.book)))
            network = Libp2pNetwork(host, identity.public, settings, book)
            stack.enter_context(watching(host, network.came, network.went))
            await stack.enter_async_context(running(host, settings.listen))
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
            raise failed from None  # the block's own error leaves as it was raised, without the nurseries' wrapping
        raise
