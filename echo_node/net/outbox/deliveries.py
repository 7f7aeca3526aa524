"""Gossip handed over by name: what `DELIVER_STREAM` carries, for whoever sends it and whoever takes it.

What is delivered is judged like gossip on its topic and, once it passes, taken. It knows nothing of what is delivered.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, BusyError, Message, Network, Reject, Unheard, Validator
from echo_node.net.guard import judge
from echo_node.net.pace import Pace
from protocol import Delivery, ProtocolError, decode, encode, limits, topics

ANSWER_BYTES: Final = limits.RECEIPT_BYTES + limits.ENVELOPE_BYTES
"""The longest answer to a delivery: a sealed receipt."""
PER_SECOND: Final = 64.0
"""Deliveries of one peer, in the long run; a long one counts as several. Beyond that it has to come again later, and waits
for it at home: a question that waits here takes the place of somebody else's."""
BURST: Final = 512.0
BYTES_A_DELIVERY: Final = 8_192
PEERS: Final = 1_024
"""Whose pace is remembered."""


@dataclass(frozen=True, slots=True)
class Taker:
    """What a node does with deliveries of one topic: the validator of that topic's gossip, and what takes what passes.

    `take` answers with nothing or a sealed receipt. An `EchoError` or `ProtocolError` of its own is a refusal.
    """

    validator: Validator
    take: Callable[[Message], Awaitable[bytes]]


async def deliver(
    network: Network, peer: bytes, topic: str, data: bytes, *, deadline: float, most: int = ANSWER_BYTES
) -> bytes:
    """Hand to one peer what would be gossiped on a topic; its answer, or a `RequestError`."""
    question = encode(Delivery.on(topic, data))
    return await network.request(peer, topics.DELIVER_STREAM, question, deadline=deadline, most=most)


@contextmanager
def serve_deliveries(network: Network, takers: Mapping[str, Taker]) -> Generator[None]:
    """Take deliveries, by topic, until the context is left. Who delivers what its seal or its size forbids is scored."""
    contained: Counter[str] = Counter()
    paces: OrderedDict[bytes, Pace] = OrderedDict()

    async def handle(peer: bytes, question: bytes) -> bytes:
        pace = paces.setdefault(peer, Pace(PER_SECOND, BURST))
        paces.move_to_end(peer)
        while len(paces) > PEERS:
            paces.popitem(last=False)
        if not pace.spend(1 + len(question) / BYTES_A_DELIVERY):
            raise BusyError("this node delivers faster than is taken of one peer")
        try:
            delivery = decode(Delivery, question)
        except ProtocolError as error:
            network.score(peer, error.reason)
            raise
        if (taker := takers.get(delivery.topic)) is None:
            raise PeerError(f"no {delivery.cargo} of that run are taken here")
        message = Message(delivery.topic, delivery.data, peer)
        said = judge(taker.validator, message, contained)
        if isinstance(said, Reject):
            network.score(peer, said.reason)
            raise PeerError(f"{delivery.cargo} that do not pass: {said.reason}")
        if isinstance(said, Unheard):
            raise BusyError(f"no {delivery.cargo} of this node are taken for now: {said.why}")
        if said is not ACCEPT:
            raise PeerError(f"these {delivery.cargo} are not wanted here")
        return await taker.take(message)

    with network.serve(topics.DELIVER_STREAM, handle, most=limits.DELIVERY_BYTES):
        yield
