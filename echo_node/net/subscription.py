"""A bounded queue whose writer never waits: the oldest item is dropped when full.

A network writes; one or more tasks of the program read. Dropped items are counted.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

import trio

from echo_node.errors import DefectError, PeerError

T = TypeVar("T")


class Subscription(Generic[T]):
    """A queue of received items, to iterate over or to `receive` from.

    Iteration ends when the subscription's context is left; when the network below it ends, readers
    get what is still buffered and then a `PeerError`.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity < math.inf:
            raise DefectError(f"an inbox for {capacity} items: it needs a bound from 1 up")
        self._in, self._out = trio.open_memory_channel[T](capacity)
        self._gone = ""
        self.dropped = 0
        """Number of items that a slow reader has lost."""

    def put(self, item: T) -> bool:
        """Add an item; return False if an older one was dropped. No-op after the end."""
        try:
            self._in.send_nowait(item)
        except trio.WouldBlock:
            self._out.receive_nowait()
            self._in.send_nowait(item)
            self.dropped += 1
            return False
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return True
        return True

    async def receive(self) -> T:
        """Return the next item, or raise `trio.EndOfChannel` after the end."""
        try:
            return await self._out.receive()
        except trio.ClosedResourceError:
            raise trio.EndOfChannel from None
        except trio.EndOfChannel:
            if self._gone:
                raise PeerError(self._gone) from None
            raise

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def __len__(self) -> int:
        return self._in.statistics().current_buffer_used

    def end(self, why: str) -> None:
        """End because the network is gone: readers get the buffered items, then `why`."""
        self._gone = self._gone or why
        self._in.close()

    def close(self) -> None:
        """Close both ends and drop what is buffered, as nobody reads any more."""
        self._in.close()
        self._out.close()
