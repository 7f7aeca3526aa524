"""A page served from its own thread, for a browser, while the test feeds the node's events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from echo_node.dashboard import serve_page
from echo_node.telemetry.snapshot import Snapshot


class Shown:
    """A board in a loop that another thread runs. What is told, is told there."""

    def __init__(self, url: str, token: trio.lowlevel.TrioToken) -> None:
        self.url = url
        self._token = token

    def tell(self, act: Callable[[], Any]) -> None:
        """Have the node do this, and wait until it has."""
        trio.from_thread.run_sync(act, trio_token=self._token)


@contextmanager
def shown(board: Snapshot, **more: Any) -> Generator[Shown]:
    """The page for as long as the block lasts."""
    ready: list[Any] = []
    there, over = threading.Event(), trio.Event()

    async def main() -> None:
        try:
            async with trio.open_nursery() as nursery:
                url = await nursery.start(partial(serve_page, board, **{"port": 0, **more}))
                ready.append(Shown(url, trio.lowlevel.current_trio_token()))
                there.set()
                await over.wait()
                nursery.cancel_scope.cancel()
        finally:
            there.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert there.wait(20)
    assert ready, "the page did not start"
    try:
        yield ready[0]
    finally:
        ready[0].tell(over.set)
        thread.join(20)
        assert not thread.is_alive(), "the page did not end"
