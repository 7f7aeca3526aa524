"""Questions and answers over libp2p streams: one stream, one question, one answer.

    question   u32be length, bytes
    answer     one byte of outcome (0 is fine), u32be length, bytes: the answer, or words for people

Whoever asked may close its side after the question. It may reset the stream at any moment, which ends the work on
its question. It knows nothing of what is asked, nor how peers are found.
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
from echo_node.net.broken import BROKEN
from echo_node.net.guard import SHORT, answer
from echo_node.net.host import HardHost, id_of, key_of
from protocol import peer_id

HANDLERS: Final = 64
"""Questions that this node answers at once; more are told that it is busy."""
HANDLERS_PER_PEER: Final = 16
QUESTION_SECONDS: Final = 30.0
"""In which a question must have come in, once its stream is open."""
WRITE_BYTES: Final = 1024 * 1024
WRITE_SECONDS: Final = 60.0
"""For one such piece."""
OUTCOMES: Final[tuple[Failure | None, ...]] = (
    None,
    "no-handler",
    "busy",
    "too-large",
    "refused",
    "internal-error",
)
WORDS_BYTES: Final = 1_024
_LENGTH: Final = 4
_log = logging.getLogger("echo_node.net.asking")


@dataclass(slots=True)
class _Service:
    handler: Handler
    most: int
    work: set[trio.CancelScope] = field(default_factory=set)


class Asking:
    """One node's questions and answers."""

    def __init__(self, host: HardHost, counts: Counter[str]) -> None:
        self._host = host
        self._counts = counts
        self._services: dict[str, _Service] = {}
        self._in_hand: Counter[bytes] = Counter()

    @contextmanager
    def serve(self, stream: str, handler: Handler, *, most: int) -> Generator[None]:
        if stream in self._services:
            raise DefectError(f"two handlers for {stream}")
        service = self._services[stream] = _Service(handler, most)

        async def take(net_stream: INetStream) -> None:
            await self._take(stream, service, net_stream)

        self._host.set_stream_handler(TProtocol(stream), take)
        try:
            yield
        finally:
            del self._services[stream]
            self._host.remove_stream_handler(TProtocol(stream))
            for scope in service.work:
                scope.cancel()

    async def ask(self, peer: bytes, stream: str, data: bytes, most: int) -> bytes:
        """The answer of a connected peer. The caller sets the deadline."""
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
            if outcome >= len(OUTCOMES) or (outcome and size > WORDS_BYTES):
                raise RequestError("unreachable", f"{who}: an answer that is none")
            if not outcome and size > most:
                raise RequestError("too-large", f"{who}: an answer of {size} bytes, at most {most} wanted")
            said = await _read_exactly(net_stream, size)
            finished = True
        except BROKEN as error:
            raise RequestError("unreachable", f"{who} went away before it answered") from error
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await (net_stream.close() if finished else net_stream.reset())
        if reason := OUTCOMES[outcome]:
            raise RequestError(reason, f"{who}: {reason}: {one_line(said.decode(errors='replace'))[:SHORT]}")
        return bytes(said)

    async def _take(self, stream: str, service: _Service, net_stream: INetStream) -> None:
        peer = key_of(net_stream.muxed_conn.peer_id)
        if peer is None:
            await net_stream.reset()
            return
        try:
            with trio.fail_after(QUESTION_SECONDS):
                question = await _read_question(net_stream, service.most)
            said = await self._answer(stream, service, net_stream, peer, question)
            if isinstance(said, RequestError):
                words = said.what.encode()[:WORDS_BYTES]
                await _write(net_stream, bytes((OUTCOMES.index(said.reason),)), words)
            elif said is not None:
                await _write(net_stream, b"\0", said)
            await net_stream.close()
        except BROKEN as error:
            _log.debug("%s stopped asking on %s: %r", peer_id(peer), stream, error)
            await net_stream.reset()

    async def _answer(
        self,
        stream: str,
        service: _Service,
        net_stream: INetStream,
        peer: bytes,
        question: bytes | RequestError,
    ) -> bytes | RequestError | None:
        """What to say; None if whoever asked has gone."""
        if isinstance(question, RequestError):
            return question
        if self._in_hand.total() >= HANDLERS or self._in_hand[peer] >= HANDLERS_PER_PEER:
            return RequestError("busy", f"it has {self._in_hand.total()} questions in hand")
        self._counts["answered"] += 1
        self._in_hand[peer] += 1
        scope = trio.CancelScope()
        service.work.add(scope)
        gone = False

        async def listen() -> None:
            nonlocal gone
            try:
                await net_stream.read(1)
            except StreamEOF:
                return  # it has said all that it will say, and waits for the answer
            except BROKEN:
                pass
            gone = True
            scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                said = await answer(service.handler, stream, peer, question, scope, self._counts)
                nursery.cancel_scope.cancel()
        finally:
            service.work.discard(scope)
            self._in_hand[peer] -= 1
            if not self._in_hand[peer]:
                del self._in_hand[peer]
        return None if gone else said


async def _read_question(stream: INetStream, most: int) -> bytes | RequestError:
    size = int.from_bytes(await _read_exactly(stream, _LENGTH))
    if size > most:
        return RequestError("too-large", f"a question of {size} bytes, at most {most} are taken")
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
