"""Who may come in: a browser or a program on this machine that asks for this very page, and says so.

A web page elsewhere that has its name point at 127.0.0.1 is known by `Host`; one that asks from its own place by `Origin` or
`Sec-Fetch-Site`. Whatever goes out carries the headers that keep the page from loading or being loaded by anything else.
It wraps any ASGI application, and knows nothing of what is behind it.
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
"""Bytes. No request has a body that is read."""
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
class Door:
    """The application behind it, and the port by which it is asked for."""

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
        asked = headers.getlist("host")
        if len(asked) != 1 or asked[0].lower() not in hosts:
            return _no(403, f"this page answers to http://127.0.0.1:{self.port} and to no other name")
        origins = headers.getlist("origin")
        if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in origins):
            return _no(403, "another web page may not ask this one")
        # A link to the page may stand anywhere; whatever else a foreign page asks for, it asks for by itself.
        if path != "/" and headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return _no(403, "another web page may not ask this one")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or int(length[:9]) > MOST_BODY:
            return _no(413, f"a request has at most {MOST_BODY} bytes of body, and says how many")
        return None


def has_token(headers: Headers, token: str) -> bool:
    """Whether the request shows this token. It takes the same time for any wrong one."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    given = shown.strip() if scheme.lower() == "bearer" else headers.get("x-echo-token", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode("utf-8", "replace"))


def _no(status: int, words: str) -> PlainTextResponse:
    return PlainTextResponse(f"{words}\n", status)
