"""ASGI middleware that refuses requests from other origins (DNS rebinding, CSRF).

A foreign name that resolves to 127.0.0.1 is recognised by `Host`; a request from a foreign page by
`Origin` or `Sec-Fetch-Site`. Every response carries headers that keep the page from loading, or
being loaded by, anything else.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
MOST_BODY: Final = 1024
"""Bytes of a request's body, which is never read."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class OriginGuard:
    """Guard of an ASGI application that is served on a port of loopback."""

    inner: ASGIApp
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        answer = self.inner if refusal is None else refusal
        await answer(scope, receive, with_headers)

    def _refusal(self, headers: Headers, path: str) -> PlainTextResponse | None:
        hosts = {f"{name}:{self.port}" for name in NAMES} | (set(NAMES) if self.port == 80 else set())
        requested = headers.getlist("host")
        if len(requested) != 1 or requested[0].lower() not in hosts:
            return _refuse(403, f"this page is served as http://127.0.0.1:{self.port} and by no other name")
        origins = headers.getlist("origin")
        if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in origins):
            return _refuse(403, "requests from other web pages are refused")
        # A link to "/" may be followed from anywhere; other requests come from a foreign script.
        if path != "/" and headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return _refuse(403, "requests from other web pages are refused")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or int(length[:9]) > MOST_BODY:
            return _refuse(413, f"a request has at most {MOST_BODY} bytes of body, and a Content-Length")
        return None


def has_token(headers: Headers, token: str) -> bool:
    """Return whether the request carries this token, in constant time."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    found = value.strip() if scheme.lower() == "bearer" else headers.get("x-echo-token", "")
    return hmac.compare_digest(found.encode("utf-8", "replace"), token.encode("utf-8", "replace"))


def _refuse(status: int, words: str) -> PlainTextResponse:
    return PlainTextResponse(f"{words}\n", status)
