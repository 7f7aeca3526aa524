"""The door beside the connection, asking side: dial, check the pin, show the pass, read.

It dials the address at which this node is connected to the peer, and never one that it was told. Reading is done in a
thread; cancelling it ends the connection at once. It knows nothing of why the bytes are wanted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError, boundary
from echo_node.net.base import Network, RequestError
from echo_node.net.blobs.sockets import blocking, run_with_socket
from echo_node.net.blobs.tls import asking, check_pin
from protocol import ProtocolError, decode, encode, limits, peer_id, topics
from protocol.blob import BulkAsk, BulkOffer, Slice, bulk_pass

ASK_SECONDS: Final = 10.0
DIAL_SECONDS: Final = 5.0
PORTION_SECONDS: Final = 30.0
"""How long a portion of at most `READ_BYTES` may take; whoever downloads is less patient."""

Deliver = Callable[[int, memoryview], None]
"""Given the number of a portion and its bytes, in a thread; they are good until it returns."""


class NoDoorError(PeerError):
    """There is no such door, or it cannot be reached from here: a stream will do, and nobody is to blame."""


async def read_bulk(
    network: Network,
    peer: bytes,
    slices: Sequence[Slice],
    portions: Sequence[int],
    deliver: Deliver,
    *,
    pace: Callable[[int], Awaitable[None]] | None = None,
    threads: trio.CapacityLimiter,
) -> None:
    """Read slices at a peer's door, and deliver them cut into portions of these lengths.

    Raises `NoDoorError` if no byte came for lack of a door, `PeerError` for all that goes wrong later.
    """
    address = network.address(peer)
    if address is None:
        raise NoDoorError(f"no direct connection to {peer_id(peer)}")
    ask = BulkAsk(tuple(slices))
    offer = await _ask(network, peer, ask)
    connection = await _dial(address, offer.port, peer)
    spoken = bulk_pass(offer.token, network.public, ask)
    started: list[bool] = []

    def work() -> None:
        with asking().wrap_socket(connection) as secure:
            check_pin(secure, offer.pin)
            secure.settimeout(PORTION_SECONDS)
            secure.sendall(spoken)
            buffer = memoryview(bytearray(max(portions)))
            for number, length in enumerate(portions):
                if pace is not None:
                    trio.from_thread.run(pace, length)
                portion = buffer[:length]
                _fill(secure, portion, started)
                deliver(number, portion)

    try:
        with boundary(PeerError, f"reading at the door of {peer_id(peer)}"):
            await run_with_socket(connection, work, threads)
    except PeerError as error:
        if started:
            raise
        raise NoDoorError(str(error)) from error


async def _ask(network: Network, peer: bytes, ask: BulkAsk) -> BulkOffer:
    try:
        answer = await network.request(
            peer, topics.BULK_STREAM, encode(ask), deadline=ASK_SECONDS, most=limits.SMALL_BYTES
        )
        return decode(BulkOffer, answer)
    except RequestError as error:
        if error.reason in ("no-handler", "refused", "busy"):
            raise NoDoorError(f"{peer_id(peer)} offers no door: {error}") from error
        raise
    except ProtocolError as error:
        raise NoDoorError(f"{peer_id(peer)} offers what is no door: {error}") from error


async def _dial(address: str, port: int, peer: bytes) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_STREAM) as connection:
        try:
            with trio.fail_after(DIAL_SECONDS):
                await connection.connect((address, port))
        except (OSError, trio.TooSlowError) as error:
            raise NoDoorError(f"the door of {peer_id(peer)} cannot be reached: {error}") from error
        return blocking(connection, DIAL_SECONDS)


def _fill(connection: socket.socket, portion: memoryview, started: list[bool]) -> None:
    deadline = time.monotonic() + PORTION_SECONDS
    filled = 0
    while filled < len(portion):
        count = connection.recv_into(portion[filled:])
        if not count:
            raise PeerError(f"it closed the door {len(portion) - filled} bytes before the end of a portion")
        if not started:
            started.append(True)
        filled += count
        if time.monotonic() > deadline:
            raise PeerError(f"{filled} bytes of a portion in {PORTION_SECONDS:g} s: too slow to wait for")
