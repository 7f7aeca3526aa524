"""Request and response over libp2p streams: one stream for each request.

    request    u32be length, bytes
    response   one byte of outcome (0 is success), u32be length, bytes: response or error text

The client may close its side after the request. It may reset the stream at any moment, which
cancels the handler.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamEOF, StreamError

from echo_node.errors import DefectError, one_line
from echo_node.net.base import Failure, Handler, RequestError
from echo_node.net.handler_guard import SHORT, run_handler
from echo_node.net.host import HardHost
from echo_node.net.swarm import BROKEN, id_of, key_of
from protocol import peer_id

HANDLERS: Final = 64
"""Requests handled at once; more are refused as busy."""
HANDLERS_PER_PEER: Final = 16
REQUEST_SECONDS: Final = 30.0
"""Seconds in which a request must be read, once its stream is open."""
WRITE_BYTES: Final = 1024 * 1024
WRITE_SECONDS: Final = 60.0
"""Seconds for one write of at most WRITE_BYTES."""
OUTCOMES: Final[tuple[Failure | None, ...]] = (
    None,
    "no-handler",
    "busy",
    "too-large",
    "refused",
    "internal-error",
)
ERROR_TEXT_BYTES: Final = 1_024
_LENGTH: Final = 4
_log = logging.getLogger("echo_node.net.request_response")


@dataclass(slots=True)
class _Service:
    """A registered handler and the requests that it works on."""

    handler: Handler
    most: int
    work: set[trio.CancelScope] = field(default_factory=set)


class RequestResponse:
    """Client and server of requests on one host."""

    def __init__(self, host: HardHost, counts: Counter[str]) -> None:
        self._host = host
        self._counts = counts
        self._services: dict[str, _Service] = {}
        self._active: Counter[bytes] = Counter()

    @contextmanager
    def serve(self, stream: str, handler: Handler, *, most: int) -> Generator[None]:
        if stream in self._services:
            raise DefectError(f"two handlers for {stream}")
        service = self._services[stream] = _Service(handler, most)

        async def handle(net_stream: INetStream) -> None:
            await self._handle(stream, service, net_stream)

        self._host.set_stream_handler(TProtocol(stream), handle)
        try:
            yield
        finally:
            del self._services[stream]
            self._host.remove_stream_handler(TProtocol(stream))
            for scope in service.work:
                scope.cancel()

    async def request(self, peer: bytes, stream: str, data: bytes, most: int) -> bytes:
        """Return the response of a connected peer. The caller sets the deadline."""
        who = f"{peer_id(peer)} on {stream}"
        try:
            net_stream = await self._host.new_stream(id_of(peer), [TProtocol(stream)])
        except StreamFailure as error:
            if "not supported" in str(error.__cause__):
                raise RequestError("no-handler", f"{who}: it does not serve this stream") from error
            raise RequestError("unreachable", f"{who}: the stream could not be opened") from error
        except BROKEN as error:
            raise RequestError("unreachable", f"{who}: {one_line(str(error))[:SHORT]}") from error
        finished = False
        try:
            await _write(net_stream, b"", data)
            outcome = (await _read_exactly(net_stream, 1))[0]
            size = int.from_bytes(await _read_exactly(net_stream, _LENGTH))
            if outcome >= len(OUTCOMES) or (outcome and size > ERROR_TEXT_BYTES):
                raise RequestError("unreachable", f"{who}: a malformed response")
            if not outcome and size > most:
                raise RequestError("too-large", f"{who}: a response of {size} bytes, the limit is {most}")
            response = await _read_exactly(net_stream, size)
            finished = True
        except BROKEN as error:
            raise RequestError("unreachable", f"{who} closed the stream before it responded") from error
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await (net_stream.close() if finished else net_stream.reset())
        if reason := OUTCOMES[outcome]:
            raise RequestError(
                reason, f"{who}: {reason}: {one_line(response.decode(errors='replace'))[:SHORT]}"
            )
        return bytes(response)

    async def _handle(self, stream: str, service: _Service, net_stream: INetStream) -> None:
        peer = key_of(net_stream.muxed_conn.peer_id)
        if peer is None:
            await net_stream.reset()
            return
        try:
            with trio.fail_after(REQUEST_SECONDS):
                request = await _read_request(net_stream, service.most)
            response = await self._respond(stream, service, net_stream, peer, request)
            if isinstance(response, RequestError):
                text = response.what.encode()[:ERROR_TEXT_BYTES]
                await _write(net_stream, bytes((OUTCOMES.index(response.reason),)), text)
            elif response is not None:
                await _write(net_stream, b"\0", response)
            await net_stream.close()
        except BROKEN as error:
            _log.debug("request of %s on %s ended early: %r", peer_id(peer), stream, error)
            await net_stream.reset()

    async def _respond(
        self,
        stream: str,
        service: _Service,
        net_stream: INetStream,
        peer: bytes,
        request: bytes | RequestError,
    ) -> bytes | RequestError | None:
        """Return the response; None if the client is gone."""
        if isinstance(request, RequestError):
            return request
        if self._active.total() >= HANDLERS or self._active[peer] >= HANDLERS_PER_PEER:
            return RequestError("busy", f"{self._active.total()} requests are being handled")
        self._counts["answered"] += 1
        self._active[peer] += 1
        scope = trio.CancelScope()
        service.work.add(scope)
        gone = False

        async def watch_client() -> None:
            nonlocal gone
            try:
                await net_stream.read(1)
            except StreamEOF:
                return  # it closed its side and waits for the response
            except BROKEN:
                pass
            gone = True
            scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch_client)
                response = await run_handler(service.handler, stream, peer, request, scope, self._counts)
                nursery.cancel_scope.cancel()
        finally:
            service.work.discard(scope)
            self._active[peer] -= 1
            if not self._active[peer]:
                del self._active[peer]
        return None if gone else response


async def _read_request(stream: INetStream, most: int) -> bytes | RequestError:
    size = int.from_bytes(await _read_exactly(stream, _LENGTH))
    if size > most:
        return RequestError("too-large", f"a request of {size} bytes, the limit is {most}")
    return bytes(await _read_exactly(stream, size))


async def _read_exactly(stream: INetStream, size: int) -> bytearray:
    got = bytearray()
    while len(got) < size:
        part = await stream.read(min(size - len(got), WRITE_BYTES))
        if not part:
            raise StreamError("the stream ended early")
        got += part
    return got


async def _write(stream: INetStream, head: bytes, data: bytes) -> None:
    first = head + len(data).to_bytes(_LENGTH)
    parts = [data[start : start + WRITE_BYTES] for start in range(0, len(data), WRITE_BYTES)] or [b""]
    for part in (first + parts[0], *parts[1:]):
        with trio.fail_after(WRITE_SECONDS):
            await stream.write(part)
