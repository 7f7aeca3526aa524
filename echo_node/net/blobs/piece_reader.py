"""Read pieces from one source, over a stream or from its bulk port.

Checks that replies have the requested length, and applies this node's download limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.bulk_client import NoBulkPortError, read_bulk
from echo_node.net.blobs.piece_scheduler import Piece, joined
from echo_node.net.blobs.source_stats import SourceStats
from echo_node.net.rate_limit import Throttle
from protocol import encode, limits, peer_id, topics
from protocol.blob import BlobRead

REQUEST_SECONDS: Final = 60.0
"""Seconds for one read; a download gives up on a stalled source long before."""
BULK_THREADS: Final = 16
"""Concurrent connections to bulk ports."""
SMALL: Final = 65_536
"""Bytes up to which a reply is written in the event loop, which costs less than a thread."""


class Intake(Protocol):
    """Receiver of the pieces of a source. An exception that it raises ends the read."""

    light: bool
    """Whether writing a small piece is quick enough for the event loop."""

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        """Write a piece, often in a thread; return its hash, or None if it came too late."""

    def count(self, request: PieceRequest, piece: Piece, digest: bytes) -> None:
        """Record a written piece, in the event loop."""

    def undo(self, piece: Piece) -> None:
        """Take back a written piece that could not be recorded."""


class WrongLengthError(PeerError):
    """A reply whose length is not the requested one."""


@dataclass(eq=False, slots=True)
class PieceRequest:
    """Pieces requested from one source, and when it last made progress."""

    peer: bytes
    pieces: Sequence[Piece]
    moved: float = field(default_factory=trio.current_time)
    step_bytes: int = 0
    """Bytes that the source has to send to show progress."""
    paused: bool = False
    """Whether it waits for this node's own download limit."""
    stalled: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def step(self, count: int) -> None:
        """Note progress; the source has to send so many bytes next."""
        self.step_bytes = count
        self.moved = trio.current_time()


class Reader:
    """Reads pieces from sources, for one node."""

    def __init__(self, network: Network, sources: SourceStats, downlink: Throttle | None = None) -> None:
        self._network = network
        self._sources = sources
        self._downlink = downlink or Throttle()
        self._threads = trio.CapacityLimiter(BULK_THREADS)

    async def read(self, request: PieceRequest, intake: Intake, *, large: bool) -> None:
        """Read the pieces of a request in order, from the bulk port if `large`."""
        if large and self._sources.may_have_port(request.peer):
            try:
                await self._from_bulk_port(request, intake)
            except NoBulkPortError:
                self._sources.no_port(request.peer)
            else:
                return
        for batch in _batches(request.pieces):
            await self._over_stream(request, batch, intake)

    async def _over_stream(self, request: PieceRequest, batch: list[Piece], intake: Intake) -> None:
        total = sum(piece.length for piece in batch)
        await self._pace(request, total)
        question = encode(BlobRead(tuple(joined(batch))))
        answer = await self._network.request(
            request.peer, topics.BLOB_STREAM, question, deadline=REQUEST_SECONDS, most=total
        )
        if len(answer) != total:
            raise WrongLengthError(f"{peer_id(request.peer)} sent {len(answer)} bytes, not {total}")

        written: list[tuple[Piece, bytes]] = []

        def write_all() -> None:
            at = 0
            for piece in batch:
                digest = intake.write(piece, memoryview(answer)[at : at + piece.length])
                at += piece.length
                if digest is not None:
                    written.append((piece, digest))

        try:
            if total <= SMALL and intake.light:
                write_all()
            else:
                await trio.to_thread.run_sync(write_all)
        finally:
            for piece, digest in written:
                intake.count(request, piece, digest)

    async def _from_bulk_port(self, request: PieceRequest, intake: Intake) -> None:
        def deliver(number: int, data: memoryview) -> None:
            piece = request.pieces[number]
            if (digest := intake.write(piece, data)) is None:
                return
            try:
                trio.from_thread.run_sync(intake.count, request, piece, digest)
            except BaseException:
                intake.undo(piece)
                raise

        async def pace(count: int) -> None:
            await self._pace(request, count)

        lengths = [piece.length for piece in request.pieces]
        request.step(lengths[0])
        await read_bulk(
            self._network,
            request.peer,
            joined(request.pieces),
            lengths,
            deliver,
            pace=pace if self._downlink.rate is not None else None,
            threads=self._threads,
        )

    async def _pace(self, request: PieceRequest, count: int) -> None:
        request.paused = True
        try:
            await self._downlink.take(count)
        finally:
            request.paused = False
            request.step(count)


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group pieces by what one stream read may carry."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece.length > limits.READ_BYTES or len(batch) == limits.SLICES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.length
    if batch:
        yield batch
