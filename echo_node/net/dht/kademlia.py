"""Kademlia DHT over libp2p streams, for provider records and peer addresses.

The protocol id is our own. The routing table and the messages are py-libp2p's; the lookup, the
server and the storage are ours, since the library's store without bound, announce without
confirmation, and answer from the local copy first. No values are stored.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.routing_table import RoutingTable
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net.dht.provider_records import PER_PROVIDER, Providers
from echo_node.net.dht.wire import MESSAGE_BYTES, Addresses, KadError, KadMessage, read_kad, write_kad
from echo_node.net.discovery.address_door import UNKNOWN
from echo_node.net.discovery.address_scope import Scope
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import HardHost
from echo_node.net.peer_scoring import PeerScores
from echo_node.net.rate_limit import TokenBucket
from echo_node.net.swarm import BROKEN, id_of, key_of
from protocol import ProtocolError, topics

K: Final = 20
ALPHA: Final = 6
"""Concurrent requests of one lookup."""
QUESTION_SECONDS: Final = 5.0
WALK_PEERS: Final = 64
"""Most peers that one lookup queries."""
ADDRESS_SECONDS: Final = 3600
REPEAT_SECONDS: Final = 15 * 60.0
"""Seconds after which this node announces its provider records again."""
REFRESH_SECONDS: Final = (1.0, 5.0, 30.0, 300.0)
"""Seconds between lookups of our own id: soon after the start, then seldom."""
STREAM_MESSAGES: Final = 64
IDLE_SECONDS: Final = 30.0
_KAD: Final = TProtocol(topics.KAD_PROTOCOL)
_log = logging.getLogger("echo_node.net.dht.kademlia")


class Dht:
    """One DHT node. Peers are added when they are connected and speak its protocol."""

    def __init__(
        self,
        host: HardHost,
        standing: PeerScores,
        counts: Counter[str],
        suggest: Callable[[bytes, Iterable[str], str], None],
    ) -> None:
        """Make it for a host. `suggest` gets the peers and addresses that others return."""
        self._host = host
        self._suggest = suggest
        self._scores = standing
        self._counts = counts
        self._me = host.get_id()
        self._table = RoutingTable(self._me, host)
        self._providers = Providers()
        self._mine: dict[bytes, float] = {}
        self._serving: dict[ID, TokenBucket] = {}
        self._table_grew = trio.Event()
        host.set_stream_handler(_KAD, self._serve)

    def __len__(self) -> int:
        return int(self._table.size())

    def known(self) -> dict[ID, list[Multiaddr]]:
        """Return the peers of the routing table."""
        return {info.peer_id: list(info.addrs) for info in self._table.get_peer_infos()}

    async def add(self, peer: ID, addresses: Iterable[Multiaddr]) -> None:
        """Add a connected peer that speaks the DHT protocol."""
        was = len(self)
        if found := list(addresses):
            await self._table.add_peer(PeerInfo(peer, found), skip_server_mode_check=True)
        if len(self) > was:
            self._table_grew.set()
            self._table_grew = trio.Event()

    async def wait_for_peers(self) -> None:
        """Wait until the routing table has one more peer."""
        await self._table_grew.wait()

    async def run(self) -> None:
        """Keep the routing table filled, and repeat the announcements."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refresh)
            nursery.start_soon(self._repeat)

    # Client

    async def provide(self, key: bytes) -> int:
        """Announce this node as a provider of a key; return how many peers confirmed."""
        self._mine.pop(key, None)
        self._mine[key] = trio.current_time()
        if len(self._mine) > PER_PROVIDER:
            del self._mine[next(iter(self._mine))]
        me = {self._me: tuple(self._host.get_addrs())}
        announcement = write_kad("add-provider", key, providers=me)
        confirmed = 0

        async def announce(peer: ID) -> None:
            nonlocal confirmed
            # a peer answers only the ping, so its answer confirms both
            confirmed += await self._ask(peer, announcement, write_kad("ping")) is not None

        async with trio.open_nursery() as nursery:
            for peer in await self.closest(key):
                nursery.start_soon(announce, peer)
        return confirmed

    def withdraw(self, key: bytes) -> None:
        """Stop announcing; the records of other nodes expire."""
        self._mine.pop(key, None)

    async def find(
        self, key: bytes, report: Callable[[bytes, tuple[Multiaddr, ...]], None], *, each: int
    ) -> None:
        """Report the providers of a key as they are found, until nobody is left to query.

        At most `each` of one response are reported.
        """
        question = write_kad("get-providers", key)

        def report_some(peers: Iterable[tuple[bytes | None, tuple[Multiaddr, ...]]]) -> None:
            for public, addresses in itertools.islice(peers, each):
                if public is not None and public != key_of(self._me):
                    report(public, addresses)

        async def ask(peer: ID) -> Addresses | None:
            answer = await self._ask(peer, question)
            if answer is None:
                return None
            report_some((key_of(one), addresses) for one, addresses in answer.providers.items())
            return answer.closer

        for public, addresses in self._providers.of(key).items():  # as admitted when they were told
            self._host.door.admit(public, map(str, addresses), replace(UNKNOWN, met=Scope.LOOPBACK))
        report_some(self._providers.of(key).items())
        await self._walk(key, ask, lambda: False)

    async def find_peer(self, public: bytes) -> tuple[Multiaddr, ...]:
        """Find the addresses of a peer."""
        target = id_of(public)
        question = write_kad("find-node", target.to_bytes())
        found: dict[Multiaddr, None] = dict.fromkeys(self._table_addresses(target))

        async def ask(peer: ID) -> Addresses | None:
            answer = await self._ask(peer, question)
            if answer is None:
                return None
            found.update(dict.fromkeys(answer.closer.get(target, ())))
            return answer.closer

        await self._walk(target.to_bytes(), ask, lambda: bool(found))
        return tuple(found)

    async def closest(self, key: bytes) -> list[ID]:
        """Return the peers closest to a key that answered."""
        question = write_kad("find-node", key)

        async def ask(peer: ID) -> Addresses | None:
            answer = await self._ask(peer, question)
            return None if answer is None else answer.closer

        return await self._walk(key, ask, lambda: False)

    async def _walk(
        self, key: bytes, ask: Callable[[ID], Awaitable[Addresses | None]], enough: Callable[[], bool]
    ) -> list[ID]:
        """Query ever closer peers; return those that answered, closest first."""
        target = int.from_bytes(sha256(key).digest())
        candidates: set[ID] = set(self._table.find_local_closest_peers(key, K))
        if len(candidates) < K:  # who has only just come is not in the table yet
            candidates.update(self._host.get_connected_peers())
        candidates.discard(self._me)
        asked: set[ID] = set()
        answered: list[ID] = []
        dead: set[ID] = set()
        done = trio.Event()
        under_way = 0

        async def one(peer: ID) -> None:
            nonlocal under_way
            closer = await ask(peer)
            under_way -= 1
            if closer is None:
                dead.add(peer)
            else:
                answered.append(peer)
                self._remember(closer)
                candidates.update(each for each in closer if each != self._me)
            done.set()

        async with trio.open_nursery() as nursery:
            while not enough():
                close = sorted(candidates - dead, key=lambda each: each.xor_id ^ target)[:K]
                waiting = [each for each in close if each not in asked]
                if not waiting and not under_way:
                    break
                if len(asked) >= WALK_PEERS and not under_way:
                    break
                for peer in waiting[: ALPHA - under_way] if len(asked) < WALK_PEERS else ():
                    asked.add(peer)
                    under_way += 1
                    nursery.start_soon(one, peer)
                done = trio.Event()
                await done.wait()
            nursery.cancel_scope.cancel()
        return sorted(answered, key=lambda each: each.xor_id ^ target)[:K]

    def _remember(self, peers: Addresses) -> None:
        """Store admitted addresses; the table takes their peers once they answered."""
        for peer, addresses in peers.items():
            public = key_of(peer)
            if addresses and public and peer != self._me:
                self._host.swarm.store.keep(peer, addresses, ADDRESS_SECONDS)
                self._suggest(public, map(str, addresses), "the DHT")

    def _admit(self, peers: Addresses, teller: ID) -> Addresses:
        """Return the peers with the addresses that their teller may name."""
        source = self._host.swarm.teller(teller)
        return {
            peer: tuple(map(Multiaddr, self._host.door.admit(public, map(str, addresses), source)))
            for peer, addresses in peers.items()
            if (public := key_of(peer)) is not None
        }

    async def _ask(self, peer: ID, *messages: bytes) -> KadMessage | None:
        """Send messages to a peer; return the response to the last, None if none."""
        public = key_of(peer)
        if public is None or self._scores.is_muted(public):
            return None
        answer: KadMessage | None = None
        with trio.move_on_after(QUESTION_SECONDS):
            try:
                answer = await self._converse(peer, *messages)
            except KadError as error:
                self._scores.fault(public, error.reason)
            except BROKEN as error:
                _log.debug("%s did not answer: %r", peer, error)
                self._table.remove_peer(peer)
        if answer is None:
            return None
        await self.add(peer, self._host.addresses_of(peer))
        return replace(
            answer, closer=self._admit(answer.closer, peer), providers=self._admit(answer.providers, peer)
        )

    async def _converse(self, peer: ID, *messages: bytes) -> KadMessage:
        stream = await self._host.new_stream(peer, [_KAD])
        try:
            await stream.write(b"".join(write_length(len(each)) + each for each in messages))
            return read_kad(await _read_message(stream))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.reset()

    # Server

    async def _serve(self, stream: INetStream) -> None:
        peer = stream.muxed_conn.peer_id
        pace = self._serving.setdefault(peer, TokenBucket(rate=100, burst=400))
        while len(self._serving) > PER_PROVIDER:
            del self._serving[next(iter(self._serving))]
        try:
            for _ in range(STREAM_MESSAGES):
                with trio.fail_after(IDLE_SECONDS):
                    data = await _read_message(stream)
                await pace.wait()
                answer = self._answer(peer, read_kad(data))
                if answer is None:
                    continue
                self._counts["dht answers"] += 1
                with trio.fail_after(IDLE_SECONDS):
                    await stream.write(write_length(len(answer)) + answer)
            await stream.close()
        except ProtocolError as error:
            self._scores.fault(stream.muxed_conn.peer_id.to_bytes()[-32:], error.reason)
            await stream.reset()
        except BROKEN:
            await stream.close()

    def _answer(self, peer: ID, asked: KadMessage) -> bytes | None:
        """Return the response; None to an announcement, which has none in this protocol."""
        public = key_of(peer)
        if asked.kind == "ping" or public is None:
            return write_kad("ping")
        if not asked.key:
            raise KadError("a question without a key")
        if asked.kind == "add-provider":
            if set(asked.providers) != {peer}:
                raise KadError("an announcement of somebody else")
            self._providers.add(asked.key, public, self._admit(asked.providers, peer)[peer])
            return None
        closer = {
            each: self._table_addresses(each)
            for each in self._table.find_local_closest_peers(asked.key, K)
            if each != peer
        }
        if asked.kind == "find-node":
            wanted = ID(asked.key)
            if wanted != peer and wanted not in closer and (known := self._host.addresses_of(wanted)):
                closer = {wanted: tuple(known), **closer}
            return write_kad("find-node", asked.key, closer)
        here = {id_of(each): addresses for each, addresses in self._providers.of(asked.key).items()}
        if asked.key in self._mine:
            here = {self._me: tuple(self._host.get_addrs()), **here}
        return write_kad("get-providers", asked.key, closer, here)

    def _table_addresses(self, peer: ID) -> tuple[Multiaddr, ...]:
        info = self._table.get_peer_info(peer)
        return tuple(info.addrs) if info else ()

    # Upkeep

    async def _refresh(self) -> None:
        for pause in itertools.chain(REFRESH_SECONDS, itertools.repeat(REFRESH_SECONDS[-1])):
            if not len(self):
                await self._table_grew.wait()
            await self.closest(self._me.to_bytes())
            self._providers.expire()
            await trio.sleep(pause)

    async def _repeat(self) -> None:
        """Announce what is due; at once, when the table has just got its first peers."""
        while True:
            if not len(self):
                await self._table_grew.wait()
                for key in tuple(self._mine):
                    await self.provide(key)
            now = trio.current_time()
            for key in [key for key, at in self._mine.items() if at <= now - REPEAT_SECONDS]:
                await self.provide(key)
            await trio.sleep(REPEAT_SECONDS / 10)


async def _read_message(stream: INetStream) -> bytes:
    """Read one length-prefixed message."""
    size = shift = 0
    while True:
        part = await stream.read(1)
        if not part:
            raise trio.TooSlowError("the stream ended")
        size |= (part[0] & 0x7F) << shift
        shift += 7
        if part[0] < 0x80:
            break
        if shift > 28:
            raise KadError("a length that does not end")
    if size > MESSAGE_BYTES:
        raise KadError(f"a message of {size} bytes, at most {MESSAGE_BYTES} are taken")
    data = bytearray()
    while len(data) < size:
        part = await stream.read(size - len(data))
        if not part:
            raise trio.TooSlowError("the stream ended")
        data += part
    return bytes(data)
