"""A bounded queue that never makes its writer wait: when it is full, the oldest item goes and is counted.

A network puts in, one or more tasks of the program take out. It knows nothing of what the items are.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

import trio

from echo_node.errors import DefectError, PeerError

T = TypeVar("T")


class Inbox(Generic[T]):
    """Iterate over it, or `receive` one by one. It ends quietly when its context is left; when the network under
    it goes away, readers get what is still there and then a `PeerError`.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity < math.inf:
            raise DefectError(f"an inbox for {capacity} items: it needs a bound from 1 up")
        self._in, self._out = trio.open_memory_channel[T](capacity)
        self._gone = ""
        self.dropped = 0
        """How many items a slow reader has lost."""

    def put(self, item: T) -> bool:
        """Add an item; False if an older one had to go for it. After the end it does nothing."""
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
        """The next item; `trio.EndOfChannel` after the end."""
        try:
            return await self._out.receive()
        except trio.ClosedResourceError:
            raise trio.EndOfChannel from None
        except trio.EndOfChannel:
            if self._gone:
                raise PeerError(self._gone) from None
            raise

    def __aiter__(self) -> Inbox[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def __len__(self) -> int:
        return self._in.statistics().current_buffer_used

    def end(self, why: str) -> None:
        """The network is gone: readers get what is there, and then `why`."""
        self._gone = self._gone or why
        self._in.close()

    def close(self) -> None:
        """Nobody reads any more; what is left is let go."""
        self._in.close()
        self._out.close()
