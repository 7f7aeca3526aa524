"""The `Network` interface: gossip, requests, provider records and peers.

Each transport implements `Network`; the rest of the program uses nothing else of this package's
transports. Peers are identified by their 32-byte public keys, payloads are bytes. Gossip may be
lost, late, repeated or out of order, and `publish` returns before the message has arrived; a
request is answered or fails by its deadline. Every queue is bounded, and what is dropped is
counted. Nothing that a peer sends, and no bug in a validator or a handler, ends the network.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from echo_node.errors import PeerError
from echo_node.net.subscription import Subscription

if TYPE_CHECKING:
    from echo_node.net.blobs.bulk_server import BulkPort

CAPACITY: Final = 256
"""Messages that a subscription buffers for a slow reader, by default."""
LOOKUP_SECONDS: Final = 10.0
ACCEPTED_SECONDS: Final = 1_800.0
"""Seconds for which a peer keeps its place after a group of its was found good."""


@dataclass(frozen=True, slots=True)
class Message:
    """A gossip message as received.

    `sender` is the peer that forwarded it; the author is named by the signature inside.
    """

    topic: str
    data: bytes
    sender: bytes


@dataclass(frozen=True, slots=True)
class Mute:
    """A peer that is muted for now, and why."""

    seconds: float
    reasons: Mapping[str, int]
    why: str = ""
    """The reasons as text, where the rule that muted the peer has its own wording."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A peer became reachable, or stopped being so."""

    public: bytes
    joined: bool


class ValidationResult(enum.Enum):
    """A validator's result for a message that is nobody's fault."""

    ACCEPT = "accept"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Reject:
    """A validator's result for an invalid message: its sender is scored for `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class SenderMuted:
    """A validator's result for messages of a muted sender.

    The same message from another peer is validated as usual.
    """

    why: str
    """Reason as text, for a sender that delivers directly and tries again later."""


ACCEPT: Final = ValidationResult.ACCEPT
IGNORE: Final = ValidationResult.IGNORE
Validation: TypeAlias = ValidationResult | Reject | SenderMuted
Validator: TypeAlias = Callable[[Message], Validation]
"""Cheap and synchronous. A `ProtocolError` that it raises is a `Reject` for that error's reason."""
Handler: TypeAlias = Callable[[bytes, bytes], Awaitable[bytes]]
"""Takes the requester's public key and the request, and returns the response.

A `ProtocolError` or `EchoError` is a refusal that the requester may read, a `BusyError` asks it to
try again later; any other error reaches it as 'internal error'. The handler is cancelled when the
requester gives up.
"""

Failure: TypeAlias = Literal[
    "unknown-peer",  # nobody of that key, or oneself
    "unreachable",  # the peer exists and there is no way to it, or the way broke
    "no-handler",  # it does not answer on this stream
    "busy",  # it has as many questions in hand as it takes, or has had enough of this asker's for now
    "too-large",  # the question for its handler, or the answer for us
    "refused",  # its handler refused
    "internal-error",  # its handler failed
    "deadline",
    "left",  # this node has left the network
]


class RequestError(PeerError):
    """A request that got no response. `reason` is for programs, the text for people."""

    def __init__(self, reason: Failure, what: str, *, advice: str = "") -> None:
        super().__init__(what, advice=advice)
        self.reason: Failure = reason


class BusyError(PeerError):
    """Raised by a handler that cannot take a valid request now.

    The requester reads why, and tries again later.
    """


class Network(Protocol):
    """One node's access to a swarm."""

    bulk: BulkPort | None
    """The port for large blobs beside the streams; None if this node has none."""

    @property
    def public(self) -> bytes:
        """This node's public key."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip a message to all other subscribers of a topic.

        A message is identified by its content: the same bytes on the same topic are neither sent
        nor delivered again for a while. At most `protocol.limits.GOSSIP_BYTES`.
        """

    def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AbstractAsyncContextManager[Subscription[Message]]:
        """Subscribe to the messages of a topic that the validator accepts.

        When the buffer is full, its oldest message is dropped.
        """

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        """Send a request and return the peer's response.

        Raises `RequestError` if there is none within `deadline` seconds, or one of more than
        `most` bytes.
        """

    def serve(self, stream: str, handler: Handler, *, most: int) -> AbstractContextManager[None]:
        """Handle requests of at most `most` bytes on a stream until the context is left."""

    async def provide(self, key: bytes, *, deadline: float = LOOKUP_SECONDS) -> None:
        """Announce this node as a provider of a DHT key until it leaves or withdraws it."""

    def withdraw(self, key: bytes) -> None:
        """Stop announcing a key. The provider records of other nodes expire."""

    async def find(self, key: bytes, count: int, *, deadline: float = LOOKUP_SECONDS) -> list[bytes]:
        """Return at most `count` other providers of a key, as found by the deadline."""

    def peers(self) -> frozenset[bytes]:
        """Return the peers that are reachable now."""

    def address(self, peer: bytes) -> str | None:
        """Return the IP address at which this node is connected to a peer.

        The address is that of the connection itself, never one that a peer claimed. None if the
        connection is relayed, or if there is none.
        """

    def protect(self, peer: bytes, seconds: float = ACCEPTED_SECONDS) -> None:
        """Keep a peer's place while connections are short.

        inf: it is a key of the manifest.
        """

    def watch(self) -> AbstractAsyncContextManager[Subscription[PeerEvent]]:
        """Watch peers become reachable and unreachable from now on.

        A reader that falls behind loses the oldest events: `peers` is authoritative.
        """

    def score(self, peer: bytes, reason: str) -> None:
        """Record a fault of a peer."""

    def scores(self) -> Mapping[bytes, Mapping[str, int]]:
        """Return the faults by peer and reason."""

    def mutes(self) -> Mapping[bytes, Mute]:
        """Return the peers that are muted for their faults: for how long, and why."""

    def counts(self) -> Mapping[str, int]:
        """Return this node's counters of sent, received, dropped and failed items."""
