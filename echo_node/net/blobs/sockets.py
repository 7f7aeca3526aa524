"""A blocking socket that a thread works with and its task can end at any moment. Knows no protocol.

Cancelling the task shuts the socket down, which wakes the thread; the task ends when the thread has.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def run_with_socket(
    connection: socket.socket, work: Callable[[], T], limiter: trio.CapacityLimiter
) -> T:
    """Run `work`, which uses the socket, in a thread, and close the socket when it is done or cancelled."""
    handle = connection.dup()  # TLS takes the socket over; this one stays ours, and shuts both
    outcome: list[T] = []
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the task
            failure.append(error)

    async def shut_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            _shut(handle)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shut_when_cancelled)
            await trio.to_thread.run_sync(attempt, limiter=limiter)
            nursery.cancel_scope.cancel()
    finally:
        handle.close()
        connection.close()
    await trio.lowlevel.checkpoint_if_cancelled()
    if failure:
        raise failure[0]
    return outcome[0]


def _shut(connection: socket.socket) -> None:
    """End both directions now, whoever is in the middle of using it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or was never open
        return


def blocking(connection: trio.socket.SocketType, timeout: float) -> socket.socket:
    """The socket under a trio socket, for a thread; no call on it takes longer than `timeout` seconds."""
    plain = socket.socket(fileno=connection.detach())
    plain.settimeout(timeout)
    return plain


def plain_address(address: str) -> str:
    """One spelling for an IP address: without a zone, and IPv4 as such even where it came in through IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
