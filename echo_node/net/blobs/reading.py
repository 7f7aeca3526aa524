"""Pieces from one source: over a stream, or at its door when there is much to read and the door can be reached.

It takes care that an answer has the length that was asked for, and of the limit on this node's own downlink. Whether
the bytes are right, and how long is too long, others decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.bulk_reader import NoDoorError, read_bulk
from echo_node.net.blobs.pieces import Piece, joined
from echo_node.net.blobs.sources import Sources
from echo_node.net.throttle import Throttle
from protocol import encode, limits, peer_id, topics
from protocol.blob import BlobRead

REQUEST_SECONDS: Final = 60.0
"""The last resort; whoever downloads gives up on a source that stalls long before."""
DOOR_THREADS: Final = 16

SMALL: Final = 65_536
"""Bytes that are taken in without a thread: less work than going to one."""


class Intake(Protocol):
    """What is done with the pieces that a source sends. What it raises ends the reading."""

    light: bool
    """Whether writing a small piece takes no time to speak of, as in memory."""

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        """Take a piece, often in a thread; its hash, or none if it is of no use any more."""

    def count(self, errand: Errand, piece: Piece, digest: bytes) -> None:
        """A piece was written; this is told in the loop."""

    def undo(self, piece: Piece) -> None:
        """A piece was written, and nobody could be told."""


class WrongLengthError(PeerError):
    """An answer of another length than was asked for."""


@dataclass(eq=False, slots=True)
class Errand:
    """Pieces under way from one source, and when it last moved."""

    peer: bytes
    pieces: Sequence[Piece]
    moved: float = field(default_factory=trio.current_time)
    step_bytes: int = 0
    """How much it is expected to send before it shows that it moves."""
    paused: bool = False
    """It waits for this node's own limit, which is no fault of the source."""
    stalled: bool = False
    by_door: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def step(self, count: int) -> None:
        """From now on it has to send so many bytes."""
        self.step_bytes = count
        self.moved = trio.current_time()


class Reader:
    """Reads from sources, for one node."""

    def __init__(self, network: Network, sources: Sources, downlink: Throttle | None = None) -> None:
        self._network = network
        self._sources = sources
        self._downlink = downlink or Throttle()
        self._threads = trio.CapacityLimiter(DOOR_THREADS)

    async def read(self, errand: Errand, intake: Intake, *, large: bool) -> None:
        """Read an errand's pieces, in their order. `large`: it is worth going to the door."""
        if large and self._sources.may_have_port(errand.peer):
            try:
                await self._at_door(errand, intake)
            except NoDoorError:
                self._sources.no_port(errand.peer)
            else:
                return
        for batch in _batches(errand.pieces):
            await self._over_stream(errand, batch, intake)

    async def _over_stream(self, errand: Errand, batch: list[Piece], intake: Intake) -> None:
        total = sum(piece.length for piece in batch)
        await self._pace(errand, total)
        question = encode(BlobRead(tuple(joined(batch))))
        answer = await self._network.request(
            errand.peer, topics.BLOB_STREAM, question, deadline=REQUEST_SECONDS, most=total
        )
        if len(answer) != total:
            raise WrongLengthError(f"{peer_id(errand.peer)} sent {len(answer)} bytes, not {total}")

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
                intake.count(errand, piece, digest)

    async def _at_door(self, errand: Errand, intake: Intake) -> None:
        errand.by_door = True

        def deliver(number: int, data: memoryview) -> None:
            piece = errand.pieces[number]
            if (digest := intake.write(piece, data)) is None:
                return
            try:
                trio.from_thread.run_sync(intake.count, errand, piece, digest)
            except BaseException:
                intake.undo(piece)
                raise

        async def pace(count: int) -> None:
            await self._pace(errand, count)

        lengths = [piece.length for piece in errand.pieces]
        errand.step(lengths[0])
        await read_bulk(
            self._network,
            errand.peer,
            joined(errand.pieces),
            lengths,
            deliver,
            pace=pace if self._downlink.rate is not None else None,
            threads=self._threads,
        )

    async def _pace(self, errand: Errand, count: int) -> None:
        errand.paused = True
        try:
            await self._downlink.take(count)
        finally:
            errand.paused = False
            errand.step(count)


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that one read may carry."""
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
