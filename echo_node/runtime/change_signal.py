"""A signal that something has changed, which any number of tasks can wait on."""

from __future__ import annotations

import trio


class ChangeSignal:
    """Wakes everybody who waits. `count` is how many times `notify` was called.

    To miss no change between a look and a wait, read `count` before the look and pass it to `wait`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = trio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self.count += 1
        self._next.set()
        self._next = trio.Event()

    async def wait(self, since: int | None = None) -> None:
        """Wait for the next change; return at once if there was one after `since`."""
        if since is None or since == self.count:
            await self._next.wait()
        else:
            await trio.lowlevel.checkpoint()
