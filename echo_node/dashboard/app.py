"""ASGI application: page files, snapshot, event stream, metrics, pause and resume.

Files are read once at the start: no path from a request ever reaches the disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from echo_node.dashboard import Control
from echo_node.dashboard.aggregates import Aggregates
from echo_node.dashboard.origin_guard import has_token
from echo_node.dashboard.prometheus import exposition
from echo_node.dashboard.sse import Listeners, NewsStream
from echo_node.dashboard.view import View, as_json

KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Permissions:
    """Actions that a visitor may take: none without a token."""

    token: str | None = None
    control: Control | None = None


def application(view: View, totals: Aggregates, permissions: Permissions, listeners: Listeners) -> Starlette:
    """Make the ASGI application of one node's page."""

    async def snapshot(_: Request) -> Response:
        return Response(as_json(view.snapshot()), media_type="application/json")

    async def metrics(_: Request) -> Response:
        totals.look()
        kind, text = exposition(view.board.snapshot(steps=1, lines=0), totals)
        return Response(text, headers={"Content-Type": kind})

    async def pause(request: Request) -> Response:
        _control(request, permissions).pause()
        return PlainTextResponse("the node pauses\n", 202)

    async def resume(request: Request) -> Response:
        _control(request, permissions).resume()
        return PlainTextResponse("the node resumes\n", 202)

    routes = [
        *_files(),
        Route("/api/snapshot", snapshot),
        Route("/api/events", _Events(view, listeners), methods=["GET"]),
        Route("/api/pause", pause, methods=["POST"]),
        Route("/api/resume", resume, methods=["POST"]),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes)


@dataclass(frozen=True, slots=True)
class _Events:
    """Event streams up to a maximum number."""

    view: View
    listeners: Listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.listeners.full:
            words = f"{self.listeners.most} pages of this node are open, which is the maximum: close one\n"
            await PlainTextResponse(words, 503, headers={"Retry-After": "30"})(scope, receive, send)
        else:
            await NewsStream(self.view, self.listeners)(scope, receive, send)


def _control(request: Request, permissions: Permissions) -> Control:
    if permissions.token is None:
        raise HTTPException(403, "this page is read-only: the node was started without a token\n")
    if not has_token(request.headers, permissions.token):
        raise HTTPException(403, "this needs the node's local token\n")
    if permissions.control is None:
        raise HTTPException(409, "this node cannot be paused\n")
    return permissions.control


def _files() -> list[Route]:
    """Return one route per file; index.html is served at "/"."""
    found = []
    for file in sorted(files(__package__).joinpath("static").iterdir(), key=lambda each: each.name):
        kind = KINDS.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found.append(Route(path, _sender(file.read_bytes(), kind)))
    return found


def _sender(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(content, headers={"Content-Type": kind})

    return send
