"""Direct delivery of gossip messages to one peer by request (`DELIVER_STREAM`).

A delivered message passes the validator of its topic, like gossip, before it is taken.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, BusyError, Message, Network, Reject, SenderMuted, Validator
from echo_node.net.handler_guard import run_validator
from echo_node.net.rate_limit import TokenBucket
from protocol import Delivery, ProtocolError, decode, encode, limits, topics

ANSWER_BYTES: Final = limits.RECEIPT_BYTES + limits.ENVELOPE_BYTES
"""Most bytes of the response to a delivery: a sealed receipt."""
PER_SECOND: Final = 64.0
"""Deliveries of one peer per second, in the long run; a long one counts as several. Beyond that the
sender is asked to try later, since a request that waits here takes the slot of another."""
BURST: Final = 512.0
BYTES_A_DELIVERY: Final = 8_192
PEERS: Final = 1_024
"""Peers whose rate is tracked."""


@dataclass(frozen=True, slots=True)
class Taker:
    """Receiver of one topic's deliveries: the gossip validator, and a callback.

    `take` returns nothing or a sealed receipt. An `EchoError` or `ProtocolError` of its own is a
    refusal.
    """

    validator: Validator
    take: Callable[[Message], Awaitable[bytes]]


async def deliver(
    network: Network, peer: bytes, topic: str, data: bytes, *, deadline: float, most: int = ANSWER_BYTES
) -> bytes:
    """Deliver a topic's gossip message to one peer; return its response.

    Raises `RequestError` if there is none.
    """
    question = encode(Delivery.on(topic, data))
    return await network.request(peer, topics.DELIVER_STREAM, question, deadline=deadline, most=most)


@contextmanager
def serve_deliveries(network: Network, takers: Mapping[str, Taker]) -> Generator[None]:
    """Accept deliveries, by topic, until the context is left.

    The sender of a delivery that is malformed or rejected is scored.
    """
    counts: Counter[str] = Counter()
    buckets: OrderedDict[bytes, TokenBucket] = OrderedDict()

    async def handle(peer: bytes, question: bytes) -> bytes:
        bucket = buckets.setdefault(peer, TokenBucket(PER_SECOND, BURST))
        buckets.move_to_end(peer)
        while len(buckets) > PEERS:
            buckets.popitem(last=False)
        if not bucket.spend(1 + len(question) / BYTES_A_DELIVERY):
            raise BusyError("this node delivers faster than is taken of one peer")
        try:
            delivery = decode(Delivery, question)
        except ProtocolError as error:
            network.score(peer, error.reason)
            raise
        if (taker := takers.get(delivery.topic)) is None:
            raise PeerError(f"no {delivery.cargo} of that run are taken here")
        message = Message(delivery.topic, delivery.data, peer)
        result = run_validator(taker.validator, message, counts)
        if isinstance(result, Reject):
            network.score(peer, result.reason)
            raise PeerError(f"{delivery.cargo} that do not pass: {result.reason}")
        if isinstance(result, SenderMuted):
            raise BusyError(f"no {delivery.cargo} of this node are taken for now: {result.why}")
        if result is not ACCEPT:
            raise PeerError(f"these {delivery.cargo} are not wanted here")
        return await taker.take(message)

    with network.serve(topics.DELIVER_STREAM, handle, most=limits.DELIVERY_BYTES):
        yield
