"""A page on a free port, and a client that sends exact bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import trio

from echo_node.dashboard import serve_page
from echo_node.telemetry.snapshot import Snapshot


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Page:
    """A page that is served. Whatever is not answered in ten seconds is a failure."""

    url: str
    nursery: trio.Nursery

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    async def ask(
        self, path: str, *, method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        told = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", **(headers or {})}
        if body and "Transfer-Encoding" not in told:
            told["Content-Length"] = str(len(body))
        with trio.fail_after(10):
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            async with stream:
                lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
                await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
                return await _answer(stream, method)

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[Listener]:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
            yield Listener(stream)


class Listener:
    """One reader of the news."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        self._parser.send(h11.EndOfMessage())
        self._text = b""
        self.head: h11.Response | None = None

    async def next(self) -> dict[str, Any]:
        """The next piece of news."""
        with trio.fail_after(10):
            while b"\n\n" not in self._text:
                event = self._parser.next_event()
                if event is h11.NEED_DATA:
                    self._parser.receive_data(await self.stream.receive_some())
                elif isinstance(event, h11.Response):
                    self.head = event
                elif isinstance(event, h11.Data):
                    self._text += bytes(event.data)
                else:
                    raise AssertionError(f"the news ended: {event}")
        block, _, self._text = self._text.partition(b"\n\n")
        [data] = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
        return json.loads(data)


async def _answer(stream: trio.SocketStream, method: str) -> Answer:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    head, body = None, b""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        else:
            assert isinstance(event, h11.EndOfMessage | h11.ConnectionClosed), event
            assert head is not None
            headers = {name.decode().lower(): value.decode() for name, value in head.headers}
            return Answer(head.status_code, headers, body)


@asynccontextmanager
async def served(board: Snapshot | None = None, **more: Any) -> AsyncGenerator[Page]:
    """A page for as long as the block lasts. That it ends is part of every test."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(serve_page, board or Snapshot(), **{"port": 0, **more}))
            yield Page(url, nursery)
            nursery.cancel_scope.cancel()
