"""The network as the rest of the program sees it. Media implement `Network`; users of it see nothing else.

Peers are named by their 32-byte public keys, cargo is bytes. Gossip may be lost, late, repeated or out of
order, and `publish` returns before it has arrived; a request is answered or fails by its deadline. Every queue
has a bound, and what a bound costs is counted. Nothing that a peer sends and no bug in a validator or a handler
ends the network.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from echo_node.errors import PeerError
from echo_node.net.inbox import Inbox

CAPACITY: Final = 256
"""Messages that a subscription holds for a reader who is busy, unless it asks for another number."""
LOOKUP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Message:
    """Gossip as it arrives. `sender` handed it to us; who wrote it, the seal inside says."""

    topic: str
    data: bytes
    sender: bytes


@dataclass(frozen=True, slots=True)
class Mute:
    """A peer that is not heard for now, and why."""

    seconds: float
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A peer can be reached from now on, or no longer."""

    public: bytes
    joined: bool


class Judgement(enum.Enum):
    """What a validator says of a message that is nobody's fault."""

    ACCEPT = "accept"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Reject:
    """What a validator says of a message that its sender should not have passed on: it is scored for `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unheard:
    """What a validator says of whatever a peer hands over that it does not hear for now; the same from another is judged."""

    why: str
    """In words, for who delivers by hand and comes again later."""


ACCEPT: Final = Judgement.ACCEPT
IGNORE: Final = Judgement.IGNORE
Validation: TypeAlias = Judgement | Reject | Unheard
Validator: TypeAlias = Callable[[Message], Validation]
"""Cheap and synchronous. A `ProtocolError` that it raises is a `Reject` for that error's reason."""
Handler: TypeAlias = Callable[[bytes, bytes], Awaitable[bytes]]
"""From the asker's key and the question to the answer. A `ProtocolError` or `EchoError` is a refusal that the
asker may read, a `BusyError` asks it to come again later; any other error reaches it as 'internal error'. It is cancelled
when the asker gives up."""

Failure: TypeAlias = Literal[
    "unknown-peer",  # nobody of that key, or oneself
    "unreachable",  # the peer exists and there is no way to it, or the way broke
    "no-handler",  # it does not answer on this stream
    "busy",  # it has as many questions in hand as it takes, or has had enough of this asker's for now
    "too-large",  # the question for its handler, or the answer for us
    "refused",  # its handler said no
    "internal-error",  # its handler failed
    "deadline",
    "left",  # this node has left the network
]


class RequestError(PeerError):
    """A request without an answer. `reason` is for programs, the text for people."""

    def __init__(self, reason: Failure, what: str, *, advice: str = "") -> None:
        super().__init__(what, advice=advice)
        self.reason: Failure = reason


class BusyError(PeerError):
    """What a handler raises when a question is in order and its time is not: the asker reads why, and comes again later."""


class Network(Protocol):
    """One node's place in a swarm."""

    @property
    def public(self) -> bytes:
        """This node's own key."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip to all who subscribe, oneself excepted. A message is its content: the same bytes on the same
        topic are for a while neither sent nor delivered again. At most `protocol.limits.GOSSIP_BYTES`.
        """

    def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AbstractAsyncContextManager[Inbox[Message]]:
        """What others gossip and the validator accepts. When the inbox is full, its oldest message goes."""

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        """The peer's answer of at most `most` bytes within `deadline` seconds, or a `RequestError`."""

    def serve(self, stream: str, handler: Handler, *, most: int) -> AbstractContextManager[None]:
        """Answer questions of at most `most` bytes on a stream, until the context is left."""

    async def provide(self, key: bytes, *, deadline: float = LOOKUP_SECONDS) -> None:
        """Let others find this node under a key of the DHT, for as long as it is here, or until it is withdrawn."""

    def withdraw(self, key: bytes) -> None:
        """Announce a key no longer. What others have noted of it they forget after a while."""

    async def find(self, key: bytes, count: int, *, deadline: float = LOOKUP_SECONDS) -> list[bytes]:
        """At most `count` others that announced the key; those that were found by the deadline."""

    def peers(self) -> frozenset[bytes]:
        """The peers that can be reached now."""

    def address(self, peer: bytes) -> str | None:
        """The IP address at which this node is connected to a peer: that of the connection itself, never one that
        it was told. None where a relay stands between, or nothing.
        """

    def watch(self) -> AbstractAsyncContextManager[Inbox[PeerEvent]]:
        """Comings and goings from now on. A reader that falls behind loses the oldest: `peers` is the truth."""

    def score(self, peer: bytes, reason: str) -> None:
        """Hold a fault against a peer."""

    def scores(self) -> Mapping[bytes, Mapping[str, int]]:
        """Faults by peer and reason."""

    def mutes(self) -> Mapping[bytes, Mute]:
        """Peers that are not heard for now, because too much of what they sent was bad: for how long, and why."""

    def counts(self) -> Mapping[str, int]:
        """What this node has sent, got, dropped and contained, by name."""
