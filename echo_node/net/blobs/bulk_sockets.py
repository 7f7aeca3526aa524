"""Blocking sockets used in threads, which their task can end at any moment.

Cancelling the task shuts the socket down, which wakes the thread; the task ends when the thread
has.
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
    """Run `work` on a socket in a thread; close the socket when done or cancelled."""
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
    """Shut both directions down now, even if a thread is using the socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or was never open
        return


def to_blocking(connection: trio.socket.SocketType, timeout: float) -> socket.socket:
    """Detach the socket under a trio socket, with a timeout in seconds for each call."""
    plain = socket.socket(fileno=connection.detach())
    plain.settimeout(timeout)
    return plain


def normalise_address(address: str) -> str:
    """Return an IP address without a zone, and an IPv4-mapped IPv6 address as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
