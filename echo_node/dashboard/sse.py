"""Server-sent events: a stream of snapshot updates to one browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio
from starlette.types import Receive, Scope, Send

from echo_node.dashboard.view import GAP_SECONDS, View, as_json

MOST_LISTENERS: Final = 16
"""Concurrent streams."""
BEAT_SECONDS: Final = 10.0
"""Seconds without news after which a keep-alive event is sent."""


class Listeners:
    """Counter of open streams."""

    def __init__(self, most: int = MOST_LISTENERS) -> None:
        self.most = most
        self.now = 0

    @property
    def full(self) -> bool:
        return self.now >= self.most


@dataclass(frozen=True, slots=True)
class NewsStream:
    """ASGI response of server-sent events: the whole snapshot, then updates.

    The caller has checked `Listeners.full`.
    """

    view: View
    listeners: Listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        self.listeners.now += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stream, send)
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self.listeners.now -= 1

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        update, cursor = self.view.since(None)
        await _event(send, b"retry: 2000\ndata: " + as_json(update))
        while True:
            await trio.sleep(GAP_SECONDS)
            with trio.move_on_after(BEAT_SECONDS) as quiet:
                await self.view.board.wait_for_news(cursor.sequence)
            if quiet.cancelled_caught:
                await _event(send, b"event: beat\ndata: {}")
            else:
                update, cursor = self.view.since(cursor)
                await _event(send, b"data: " + as_json(update))


async def _event(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text + b"\n\n", "more_body": True})
