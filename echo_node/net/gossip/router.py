"""GossipSub v1.1 over libp2p streams, with content-addressed messages.

One stream a peer each way. A message passes the validators of its topic, in order of arrival,
before it is forwarded, and a peer that sends faster than it is read gets backpressure. Frames are
unsigned: the seal inside a message names its author.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure

from echo_node.net.base import ACCEPT, CAPACITY, Message, Reject, SenderMuted, Validation, Validator
from echo_node.net.dedup import DuplicateFilter, message_id
from echo_node.net.gossip.mesh import ASK_AT_ONCE, Mesh, Out
from echo_node.net.gossip.wire import PROTOCOL_ID, Control, Published, read_frame, take_frames, write_frame
from echo_node.net.handler_guard import run_validator
from echo_node.net.host import HardHost
from echo_node.net.peer_scoring import PeerScores
from echo_node.net.rate_limit import TokenBucket
from echo_node.net.subscription import Subscription
from echo_node.net.swarm import BROKEN, id_of, key_of
from protocol import ProtocolError

HEARTBEAT_SECONDS: Final = 1.0
QUEUE_BYTES: Final = 8 * 1024 * 1024
"""Bytes queued for one peer; more is dropped and offered at the next heartbeats."""
WRITE_BYTES: Final = 256 * 1024
WRITE_SECONDS: Final = 30.0
READ_BYTES: Final = 65_536
MESSAGES_PER_SECOND: Final = 500
"""Messages read of one peer per second in the long run; more get backpressure."""
BURST: Final = 2_000
REFUSED: Final = 4_096
"""Messages that were refused and are remembered, so that they are judged once."""
RETRY_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0)
_log = logging.getLogger("echo_node.net.gossip.router")


@dataclass(slots=True)
class _Outgoing:
    """Queued frames to one peer."""

    frames: deque[bytes] = field(default_factory=deque)
    size: int = 0
    news: trio.Event = field(default_factory=trio.Event)

    def put(self, frame: bytes) -> bool:
        if self.size + len(frame) > QUEUE_BYTES:
            return False
        self.frames.append(frame)
        self.size += len(frame)
        self.news.set()
        return True

    def clear(self) -> None:
        self.frames.clear()
        self.size = 0

    async def take(self) -> bytes:
        while not self.frames:
            self.news = trio.Event()
            await self.news.wait()
        taken = [self.frames.popleft()]
        size = len(taken[0])
        while self.frames and size + len(self.frames[0]) <= WRITE_BYTES:
            taken.append(self.frames.popleft())
            size += len(taken[-1])
        self.size -= size
        return b"".join(taken)


class Gossip:
    """GossipSub router of one host."""

    def __init__(self, host: HardHost, scores: PeerScores, counts: Counter[str]) -> None:
        self._host = host
        self._scores = scores
        self._counts = counts
        self._me = key_of(host.get_id())
        self._mesh = Mesh(Random())  # noqa: S311 - spreads load, keeps no secret
        self._seen = DuplicateFilter()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._inboxes: dict[str, list[tuple[Validator, Subscription[Message]]]] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}
        self._reading: Counter[bytes] = Counter()
        host.set_stream_handler(TProtocol(PROTOCOL_ID), self._read)

    # Interface of the network

    async def publish(self, topic: str, data: bytes) -> None:
        identifier = message_id(topic, data)
        if identifier in self._seen:
            self._counts["repeated"] += 1
            return
        self._seen.add(identifier)
        message = Published(topic, data)
        self._mesh.remember(identifier, message, own=True)
        self._counts["published"] += 1
        self._send(message, self._mesh.recipients(topic, trio.current_time(), own=True))
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AsyncGenerator[Subscription[Message]]:
        inbox: Subscription[Message] = Subscription(capacity)
        entry = (validator, inbox)
        entries = self._inboxes.setdefault(topic, [])
        entries.append(entry)
        if len(entries) == 1:
            self._announce(topic, on=True)
            self._send_control(self._mesh.join(topic, trio.current_time()))
        try:
            await trio.lowlevel.checkpoint()
            yield inbox
        finally:
            entries.remove(entry)
            inbox.close()
            if not entries:
                del self._inboxes[topic]
                self._send_control(self._mesh.leave(topic, trio.current_time()))
                self._announce(topic, on=False)

    def neighbours(self, topic: str) -> frozenset[bytes]:
        """Return the mesh peers of a topic."""
        return self._mesh.mesh(topic)

    def subscribers(self, topic: str) -> set[bytes]:
        """Return the connected subscribers of a topic."""
        return self._mesh.subscribers(topic)

    def end(self, why: str) -> None:
        """End all subscriptions."""
        for inbox in [inbox for entries in self._inboxes.values() for _, inbox in entries]:
            inbox.end(why)

    async def run(self) -> None:
        """Run the heartbeat until cancelled."""
        while True:
            await trio.sleep(HEARTBEAT_SECONDS)
            self._send_control(self._mesh.heartbeat(trio.current_time()))

    async def serve_peer(self, peer: bytes, connected: Callable[[], bool]) -> None:
        """Keep a stream to a peer open while it is connected."""
        if peer in self._outgoing:
            return
        outgoing = self._outgoing[peer] = _Outgoing()
        self._mesh.add(peer)
        failures = 0
        try:
            while connected():
                try:
                    stream = await self._host.new_stream(id_of(peer), [TProtocol(PROTOCOL_ID)])
                except StreamFailure as error:
                    if "not supported" in str(error.__cause__):
                        return  # it does not gossip
                except BROKEN:
                    pass
                else:
                    failures = 0
                    await self._write(stream, outgoing)
                await trio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
        finally:
            del self._outgoing[peer]
            self._mesh.remove(peer)

    # Out

    async def _write(self, stream: INetStream, outgoing: _Outgoing) -> None:
        """Write queued frames until the stream breaks."""

        async def listen() -> None:
            """Wait for the end of the outgoing stream; it carries nothing back."""
            try:
                await stream.read(1)
            except BROKEN as error:
                _log.debug("gossip stream to %s ended: %r", stream.muxed_conn.peer_id, error)
            nursery.cancel_scope.cancel()

        outgoing.clear()
        if self._mesh.topics:
            outgoing.put(write_frame(subscriptions=[(topic, True) for topic in self._mesh.topics]))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                while True:
                    data = await outgoing.take()
                    with trio.fail_after(WRITE_SECONDS):
                        await stream.write(data)
        except* BROKEN as errors:
            _log.debug("gossip stream to %s ended: %r", stream.muxed_conn.peer_id, errors)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.reset()

    def _announce(self, topic: str, *, on: bool) -> None:
        frame = write_frame(subscriptions=[(topic, on)])
        for peer in self._outgoing:
            self._put(peer, frame)

    def _send_control(self, out: Out) -> None:
        for peer, control in out.items():
            if control:
                at_once, more = control.want[:ASK_AT_ONCE], control.want[ASK_AT_ONCE:]
                self._put(peer, write_frame(control=dataclasses.replace(control, want=at_once)))
                for start in range(0, len(more), ASK_AT_ONCE):
                    self._put(peer, write_frame(control=Control(want=more[start : start + ASK_AT_ONCE])))

    def _send(self, message: Published, peers: set[bytes]) -> None:
        if peers:
            frame = write_frame(published=[message])
            for peer in peers:
                if self._put(peer, frame):
                    self._counts["sent"] += 1
                elif peer in self._outgoing:
                    self._mesh.owe(peer, message_id(message.topic, message.data), message.topic)

    def _put(self, peer: bytes, frame: bytes) -> bool:
        if peer not in self._outgoing:
            return False
        fits = self._outgoing[peer].put(frame)
        self._counts["overflow"] += not fits
        return fits

    # In

    async def _read(self, stream: INetStream) -> None:
        peer = key_of(stream.muxed_conn.peer_id)
        if peer is None or self._reading[peer] >= 2:  # one, and one more while it is replaced
            await stream.reset()
            return
        self._reading[peer] += 1
        rate = TokenBucket(MESSAGES_PER_SECOND, BURST)
        buffer = bytearray()
        try:
            while chunk := await stream.read(READ_BYTES):
                buffer += chunk
                for body in take_frames(buffer):
                    await rate.wait(self._handle_frame(peer, body))
        except ProtocolError as error:
            self._scores.fault(peer, error.reason)
            _log.info("gossip stream of %s reset: %s", id_of(peer), error)
            await stream.reset()
        except BROKEN as error:
            _log.debug("gossip stream of %s ended: %r", id_of(peer), error)
        finally:
            self._reading[peer] -= 1
            if not self._reading[peer]:
                del self._reading[peer]

    def _handle_frame(self, peer: bytes, body: bytes) -> float:
        """Handle one frame and return its cost in messages."""
        frame = read_frame(body)
        if self._scores.is_muted(peer):
            self._counts["muted"] += 1
            return frame.cost
        now = trio.current_time()
        for topic, on in frame.subscriptions:
            out, missed = self._mesh.handle_subscription(peer, topic, now, on=on)
            for message in missed:
                self._send(message, {peer})
            self._send_control(out)
        for message in frame.published:
            self._handle_message(peer, message)
        self._handle_control(peer, frame.control, now)
        return frame.cost

    def _handle_control(self, peer: bytes, control: Control, now: float) -> None:
        for topic in control.graft:
            out, fault = self._mesh.handle_graft(peer, topic, now)
            if fault:
                self._scores.fault(peer, fault)
            self._send_control(out)
        for topic, seconds in control.prune:
            self._mesh.handle_prune(peer, topic, seconds, now)
        for topic, ids in control.have:
            fresh = [each for each in ids if each not in self._seen and each not in self._refused]
            self._send_control(self._mesh.handle_ihave(peer, topic, fresh))
        for message in self._mesh.handle_iwant(peer, control.want):
            self._send(message, {peer})

    def _handle_message(self, peer: bytes, message: Published) -> None:
        """Validate a message once per subscription, deliver and forward it."""
        if message.topic not in self._inboxes:
            self._counts["unwanted"] += 1
            return
        identifier = message_id(message.topic, message.data)
        if identifier in self._seen:
            self._counts["repeated"] += 1
            return
        if reason := self._refused.get(identifier):
            self._scores.fault(peer, reason)
            return
        verdicts = [
            (run_validator(validator, Message(message.topic, message.data, peer), self._counts), inbox)
            for validator, inbox in self._inboxes[message.topic]
        ]
        self._deliver(peer, identifier, message, verdicts)

    def _deliver(
        self,
        peer: bytes,
        identifier: bytes,
        message: Published,
        verdicts: list[tuple[Validation, Subscription[Message]]],
    ) -> None:
        rejected = next((each.reason for each, _ in verdicts if isinstance(each, Reject)), "")
        if rejected:
            self._counts["rejected"] += 1
            self._scores.fault(peer, rejected)
            self._refused[identifier] = rejected
            if len(self._refused) > REFUSED:
                self._refused.popitem(last=False)
        accepted = [inbox for each, inbox in verdicts if each is ACCEPT]
        muted = not accepted and any(isinstance(each, SenderMuted) for each, _ in verdicts)
        # else a muted peer could suppress the message for others
        if not rejected and not muted:
            self._seen.add(identifier)
        if not accepted:
            self._counts["ignored"] += not rejected
            return
        self._scores.credit(peer)
        for inbox in accepted:
            self._counts["received"] += 1
            self._counts["dropped"] += not inbox.put(Message(message.topic, message.data, peer))
        if not rejected:
            self._mesh.remember(identifier, message, own=False)
            self._send(
                message, self._mesh.recipients(message.topic, trio.current_time(), own=False, but=(peer,))
            )
