"""One node of a `MemorySwarm`: topics, handlers, requests, provider records.

Decides what a node does with a message; the swarm decides which messages arrive, and when.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from echo_node.errors import DefectError
from echo_node.net.base import (
    ACCEPT,
    ACCEPTED_SECONDS,
    CAPACITY,
    LOOKUP_SECONDS,
    Failure,
    Handler,
    Message,
    Mute,
    PeerEvent,
    Reject,
    RequestError,
    Validator,
)
from echo_node.net.dedup import DuplicateFilter, message_id
from echo_node.net.handler_guard import check_bytes, check_name, run_handler, run_validator
from echo_node.net.peer_scoring import PeerScores
from echo_node.net.subscription import Subscription
from protocol import limits, peer_id

if TYPE_CHECKING:
    from echo_node.net.blobs.bulk_server import BulkPort
    from echo_node.net.memory import MemorySwarm

HANDLERS: Final = 64
"""Requests that one node handles at once; more get `busy`."""
RECORDS: Final = 65_536
"""Keys that one node announces; the oldest is dropped."""
GONE: Final = "this node has left the network"


@dataclass(eq=False, slots=True)
class _Service:
    handler: Handler
    most: int
    work: set[trio.CancelScope] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Call:
    """A pending request, and its error if it was broken off."""

    peer: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    broken: RequestError | None = None

    def break_off(self, reason: Failure, what: str) -> None:
        self.broken = self.broken or RequestError(reason, what)
        self.scope.cancel()


class MemoryNetwork:
    """A `Network` within one process. `MemorySwarm.join` makes it."""

    def __init__(self, swarm: MemorySwarm, public: bytes) -> None:
        self._swarm = swarm
        self._public = public
        self._here = True
        self._topics: dict[str, list[tuple[Validator, Subscription[Message]]]] = {}
        self._services: dict[str, _Service] = {}
        self._calls: set[_Call] = set()
        self._watchers: list[Subscription[PeerEvent]] = []
        self._provided: dict[bytes, None] = {}
        self._seen = DuplicateFilter()
        self._scores = PeerScores()
        self._counts: Counter[str] = Counter()
        self.bulk: BulkPort | None = None
        """None until a caller opens one: only then is a socket used."""

    @property
    def public(self) -> bytes:
        return self._public

    def __repr__(self) -> str:
        return f"MemoryNetwork({peer_id(self._public)})"

    async def publish(self, topic: str, data: bytes) -> None:
        check_bytes(data, "gossip")
        check_name(topic, "a topic")
        if len(data) > limits.GOSSIP_BYTES:
            raise DefectError(
                f"publishing {len(data)} bytes on {topic}: gossip takes at most {limits.GOSSIP_BYTES}",
                advice="send a reference, and let others fetch the rest",
            )
        await trio.lowlevel.checkpoint()
        self._check_here()
        if (identifier := message_id(topic, data)) in self._seen:
            self._counts["repeated"] += 1
            return
        self._seen.add(identifier)
        self._counts["published"] += 1
        self._swarm.gossip(identifier, Message(topic, data, self._public))

    @asynccontextmanager
    async def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AsyncGenerator[Subscription[Message]]:
        check_name(topic, "a topic")
        self._check_here()
        inbox: Subscription[Message] = Subscription(capacity)
        entry = (validator, inbox)
        self._topics.setdefault(topic, []).append(entry)
        try:
            await trio.lowlevel.checkpoint()
            yield inbox
        finally:
            self._topics[topic].remove(entry)
            if not self._topics[topic]:
                del self._topics[topic]
            inbox.close()

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        check_bytes(peer, "a peer's key")
        check_bytes(data, "a question")
        if not 0 < deadline < math.inf:
            raise DefectError(f"a request with a deadline of {deadline} seconds: it must be above 0 and end")
        self._check_here()
        self._counts["asked"] += 1
        call = _Call(peer)
        self._calls.add(call)
        try:
            with trio.move_on_after(deadline), call.scope:
                return await self._exchange(peer, stream, data, most)
        finally:
            self._calls.discard(call)
        raise call.broken or RequestError(
            "deadline", f"{peer_id(peer)} did not answer on {stream} within {deadline:g} s (deadline)"
        )

    @contextmanager
    def serve(self, stream: str, handler: Handler, *, most: int) -> Generator[None]:
        check_name(stream, "a stream")
        self._check_here()
        if stream in self._services:
            raise DefectError(f"two handlers for {stream} on one node")
        service = self._services[stream] = _Service(handler, most)
        try:
            yield
        finally:
            del self._services[stream]
            for scope in service.work:
                scope.cancel()

    async def provide(self, key: bytes, *, deadline: float = LOOKUP_SECONDS) -> None:
        await self._look_up(key, deadline)
        self._provided.pop(key, None)
        self._provided[key] = None
        if len(self._provided) > RECORDS:
            del self._provided[next(iter(self._provided))]

    def withdraw(self, key: bytes) -> None:
        self._provided.pop(key, None)

    async def find(self, key: bytes, count: int, *, deadline: float = LOOKUP_SECONDS) -> list[bytes]:
        reachable = self._swarm.reachable(self._public) if await self._look_up(key, deadline) else {}
        return [public for public, node in reachable.items() if key in node._provided][: max(0, count)]  # noqa: SLF001

    def peers(self) -> frozenset[bytes]:
        return frozenset(self._swarm.reachable(self._public)) if self._here else frozenset()

    def address(self, peer: bytes) -> str | None:
        return self._swarm.address if peer in self.peers() else None

    def protect(self, peer: bytes, seconds: float = ACCEPTED_SECONDS) -> None:
        """Do nothing: places of a swarm in memory are never short."""

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[Subscription[PeerEvent]]:
        self._check_here()
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
        return dict(self._counts)

    # For the swarm:

    def listens(self, topic: str) -> bool:
        return topic in self._topics

    def arrive(self, identifier: bytes, message: Message, *, again: bool) -> None:
        """Validate a message once per subscription, and queue it where it is accepted."""
        if self._scores.is_muted(message.sender):
            self._counts["muted"] += 1
            return
        if identifier in self._seen and not again:
            self._counts["repeated"] += 1
            return
        rejected = ""
        for validator, inbox in tuple(self._topics.get(message.topic, ())):
            result = run_validator(validator, message, self._counts)
            if isinstance(result, Reject):
                rejected = rejected or result.reason
                continue
            if result is not ACCEPT:
                self._counts["ignored"] += 1
                continue
            self._seen.add(identifier)
            self._scores.credit(message.sender)
            self._counts["received"] += 1
            self._counts["dropped"] += not inbox.put(message)
        if rejected:
            self._counts["rejected"] += 1
            self._scores.fault(message.sender, rejected)

    def notice(self, before: Mapping[bytes, object], after: Mapping[bytes, object]) -> None:
        """Notify the watchers of changed peers, and fail requests to those that went."""
        gone = [public for public in before if public not in after]
        events = [PeerEvent(public, joined=False) for public in gone]
        events += [PeerEvent(public, joined=True) for public in after if public not in before]
        for watcher in self._watchers:
            for event in events:
                watcher.put(event)
        for call in self._calls:
            if call.peer in gone:
                call.break_off("unreachable", f"{peer_id(call.peer)} went away before it answered")

    def end(self) -> None:
        """End everything that waits on this node, as it has left."""
        self._here = False
        for inbox in [inbox for entries in self._topics.values() for _, inbox in entries]:
            inbox.end(GONE)
        for watcher in self._watchers:
            watcher.end(GONE)
        for call in self._calls:
            call.break_off("left", GONE)

    async def _exchange(self, peer: bytes, stream: str, data: bytes, most: int) -> bytes:
        self._swarm.reach(self._public, peer)
        await trio.sleep(self._swarm.pause(self._public, peer))
        server = self._swarm.reach(self._public, peer)
        response = await server._serve_one(stream, self._public, data)  # noqa: SLF001 -- of the same class
        await trio.sleep(self._swarm.pause(peer, self._public))
        if isinstance(response, RequestError):
            raise RequestError(
                response.reason, f"{peer_id(peer)} on {stream}: {response.reason}: {response.what}"
            )
        if len(response) > most:
            raise RequestError(
                "too-large",
                f"{peer_id(peer)} on {stream}: an answer of {len(response)} bytes, at most {most} wanted",
            )
        return response

    async def _serve_one(self, stream: str, asker: bytes, data: bytes) -> bytes | RequestError:
        service = self._services.get(stream)
        if service is None:
            return RequestError("no-handler", "it does not serve this stream")
        if self._scores.is_muted(asker):
            return RequestError("unreachable", "it does not hear this node for now")
        if len(data) > service.most:
            return RequestError(
                "too-large", f"a question of {len(data)} bytes, at most {service.most} are taken"
            )
        if sum(len(each.work) for each in self._services.values()) >= HANDLERS:
            return RequestError("busy", f"it has {HANDLERS} questions in hand")
        self._counts["answered"] += 1
        return await self._run_in_swarm(service, stream, asker, data)

    async def _run_in_swarm(
        self, service: _Service, stream: str, asker: bytes, data: bytes
    ) -> bytes | RequestError:
        """Run the handler in a task of the swarm, apart from the requester's scope."""
        scope, done, response = trio.CancelScope(), trio.Event(), list[bytes | RequestError]()

        async def work() -> None:
            response.append(await run_handler(service.handler, stream, asker, data, scope, self._counts))
            done.set()

        if self._swarm.nursery is None:
            return RequestError("unreachable", "the swarm is closed")
        service.work.add(scope)
        self._swarm.nursery.start_soon(work, name=f"{stream} at {self!r}")
        try:
            await done.wait()
        finally:
            scope.cancel()
            service.work.discard(scope)
        return response[0]

    async def _look_up(self, key: bytes, deadline: float) -> bool:
        """Simulate the time of a lookup; return False if the deadline came first."""
        check_bytes(key, "a key of the DHT")
        self._check_here()
        with trio.move_on_after(deadline) as limit:
            await trio.sleep(self._swarm.pause(self._public, self._public))
            self._check_here()
        return not limit.cancelled_caught

    def _check_here(self) -> None:
        if not self._here:
            raise RequestError("left", GONE)
