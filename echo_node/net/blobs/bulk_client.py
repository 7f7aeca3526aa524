"""Read blob ranges from a peer's bulk port: token, dial, pin check, read.

The address dialled is that of the Noise connection to the peer, never one that the peer names.
Reading is done in a thread; cancelling it ends the connection at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError, boundary
from echo_node.net.base import Network, RequestError
from echo_node.net.blobs.bulk_sockets import run_with_socket, to_blocking
from echo_node.net.blobs.bulk_tls import check_pin, client_tls
from echo_node.net.discovery.address_door import port_may_be_dialled
from protocol import ProtocolError, decode, encode, limits, peer_id, topics
from protocol.blob import BulkAsk, BulkOffer, Slice, bulk_pass

ASK_SECONDS: Final = 10.0
DIAL_SECONDS: Final = 5.0
PORTION_SECONDS: Final = 30.0
"""Seconds for a portion of at most `READ_BYTES`; downloads give up on a stalled source sooner."""

Deliver = Callable[[int, memoryview], None]
"""Called in a thread with a portion's number and bytes, which are valid until it returns."""


class NoBulkPortError(PeerError):
    """The peer has no bulk port that can be reached from here; a stream will do."""


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
    """Read slices from a peer's bulk port, delivered in portions of these lengths.

    Raises `NoBulkPortError` if it failed before the first byte, `PeerError` if it failed later.
    """
    address = network.address(peer)
    if address is None:
        raise NoBulkPortError(f"no direct connection to {peer_id(peer)}")
    ask = BulkAsk(tuple(slices))
    offer = await _ask(network, peer, ask)
    if not port_may_be_dialled(offer.port):
        raise NoBulkPortError(f"{peer_id(peer)} offers port {offer.port}, which no peer may name")
    connection = await _dial(address, offer.port, peer)
    shown = bulk_pass(offer.token, network.public, ask)
    started: list[bool] = []

    def work() -> None:
        with client_tls().wrap_socket(connection) as secure:
            check_pin(secure, offer.pin)
            secure.settimeout(PORTION_SECONDS)
            secure.sendall(shown)
            buffer = memoryview(bytearray(max(portions)))
            for number, length in enumerate(portions):
                if pace is not None:
                    trio.from_thread.run(pace, length)
                portion = buffer[:length]
                _fill(secure, portion, started)
                deliver(number, portion)

    try:
        with boundary(PeerError, f"reading from the bulk port of {peer_id(peer)}"):
            await run_with_socket(connection, work, threads)
    except PeerError as error:
        if started:
            raise
        raise NoBulkPortError(str(error)) from error


async def _ask(network: Network, peer: bytes, ask: BulkAsk) -> BulkOffer:
    try:
        answer = await network.request(
            peer, topics.BULK_STREAM, encode(ask), deadline=ASK_SECONDS, most=limits.SMALL_BYTES
        )
        return decode(BulkOffer, answer)
    except RequestError as error:
        if error.reason in ("no-handler", "refused", "busy"):
            raise NoBulkPortError(f"{peer_id(peer)} offers no bulk port: {error}") from error
        raise
    except ProtocolError as error:
        raise NoBulkPortError(f"{peer_id(peer)} sent a malformed bulk offer: {error}") from error


async def _dial(address: str, port: int, peer: bytes) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_STREAM) as connection:
        try:
            with trio.fail_after(DIAL_SECONDS):
                await connection.connect((address, port))
        except (OSError, trio.TooSlowError) as error:
            raise NoBulkPortError(f"the bulk port of {peer_id(peer)} cannot be reached: {error}") from error
        return to_blocking(connection, DIAL_SECONDS)


def _fill(connection: socket.socket, portion: memoryview, started: list[bool]) -> None:
    deadline = time.monotonic() + PORTION_SECONDS
    filled = 0
    while filled < len(portion):
        count = connection.recv_into(portion[filled:])
        if not count:
            raise PeerError(f"the connection ended {len(portion) - filled} bytes before the end of a portion")
        if not started:
            started.append(True)
        filled += count
        if time.monotonic() > deadline:
            raise PeerError(f"{filled} bytes of a portion in {PORTION_SECONDS:g} s: too slow")
