"""One round of a download: pieces from up to four sources at once.

A faster source is asked for more. A source that stalls, lies or disconnects is dropped and
replaced; the last pieces are requested from two. The round ends when all is here or no source is
left.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.errors import EchoError, PeerError, StoreError
from echo_node.net.base import Network, RequestError
from echo_node.net.blobs.assembly import BlobAssembly, SourceCheck, WrongBytesError
from echo_node.net.blobs.piece_reader import Intake, PieceRequest, Reader, WrongLengthError
from echo_node.net.blobs.piece_scheduler import PIECE_BYTES, Piece, PieceScheduler
from echo_node.net.blobs.source_stats import Fault, SourceStats
from protocol import limits

LANES: Final = 2
"""Concurrent requests to one source, so that it sends while the next request travels."""
REQUEST_GOAL_SECONDS: Final = 0.5
"""Seconds that a stream read should take: a slow source is asked for less."""
BUSY_PAUSES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds to wait after each refusal for being busy; the source is dropped after the last."""
FAULT_OF: Final[dict[str, Fault]] = {
    "deadline": "stalled",
    "too-large": "wrong-size",
    "refused": "refused",
    "no-handler": "refused",
    "internal-error": "refused",
    "busy": "refused",
}


@dataclass(frozen=True, slots=True)
class DownloadSettings:
    """Parameters of a download."""

    sources: int = 4
    """Peers fetched from at once."""
    bulk_from: int = 32 * 1024 * 1024
    """Bytes from which bulk ports are used: token, dial and handshake cost four round trips."""
    span: int = 64 * 1024 * 1024
    """Most bytes of one request at a bulk port."""
    least_span: int = 8 * 1024 * 1024
    """Least bytes of one request at a bulk port, while so many are missing."""
    stall_floor: float = 5.0
    """Seconds before which no source counts as stalled."""
    stall_factor: float = 8.0
    """A source has stalled after so many times what the others would have taken."""
    stall_cap: float = 30.0
    """Seconds without a byte after which a source has always stalled."""
    renew_seconds: float = 1.0
    """Seconds between questions to peers about what they hold: they download, too."""
    round_pauses: tuple[float, ...] = (0.2, 1.0, 3.0)
    """Seconds to wait after each round without progress; after the last the download fails."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a download, for display and metrics."""

    done: int
    total: int
    sources: int


class Download:
    """One round of a download. Call `run` once."""

    def __init__(
        self,
        network: Network,
        sources: SourceStats,
        reader: Reader,
        settings: DownloadSettings,
        assemblies: Collection[BlobAssembly],
        holders: dict[bytes, frozenset[bytes]],
        *,
        luck: random.Random,
        progress: Callable[[Progress], None],
        arrived: Callable[[bytes], None] = lambda _blob: None,
    ) -> None:
        self._network = network
        self._sources = sources
        self._reader = reader
        self._settings = settings
        self._assemblies = {assembly.blob: assembly for assembly in assemblies}
        self._holders = holders
        self._spares = sources.in_order(holders)
        self._active: dict[bytes, trio.CancelScope] = {}
        self._gone: set[bytes] = set()
        self._liars: set[bytes] = set()
        self._failure: EchoError | None = None
        self._requests: set[PieceRequest] = set()
        self._finalising = 0
        self._progress = progress
        self._arrived = arrived
        self._luck = luck
        self._over = trio.Event()
        self.scheduler = PieceScheduler(luck)
        self.scheduler.add([piece for assembly in assemblies for piece in assembly.missing()])
        self._writer = _PieceWriter(self, self._assemblies)
        self._total = sum(assembly.size for assembly in assemblies)
        self._large = self.scheduler.left_bytes >= settings.bulk_from

    async def run(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Fetch until every blob is final, or no source is left that could help.

        `meanwhile` runs until then, and may call `renew` with new holders.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if meanwhile is not None:
                nursery.start_soon(meanwhile)
            for assembly in self._assemblies.values():
                if assembly.complete:
                    self._finalise_soon(assembly)
            nursery.start_soon(self._watch)
            self._start_sources()
            await self._over.wait()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    # Sources

    def renew(self, holders: dict[bytes, frozenset[bytes]]) -> None:
        """Update which peers hold which blobs."""
        for peer, held in holders.items():
            self._holders[peer] = held
            if peer not in self._active and peer not in self._gone and peer not in self._spares:
                self._spares.append(peer)
        self.scheduler.rarity = Counter(blob for held in self._holders.values() for blob in held)
        self.scheduler.notify()
        self._start_sources()

    def _start_sources(self) -> None:
        """Start sources up to their number; end the round if no work or no source is left."""
        while self._spares and len(self._active) < self._settings.sources and not self.scheduler.empty:
            peer = self._spares.pop(0)
            if not self.scheduler.wants_any(self._holders[peer]):
                continue
            self._active[peer] = scope = trio.CancelScope()
            self._nursery.start_soon(self._run_source, peer, scope)
        if not self._finalising and (self.scheduler.empty or not self._active):
            self._over.set()

    async def _run_source(self, peer: bytes, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for _ in range(LANES):
                    nursery.start_soon(self._lane, peer)

    def _stop_source(self, peer: bytes) -> None:
        """Stop a source that has nothing to send, and start another in its place."""
        if peer in self._active:
            self._active.pop(peer).cancel()
        self._start_sources()

    def _drop(self, peer: bytes, fault: Fault) -> None:
        """Drop a source that failed, for the rest of this round."""
        if peer not in self._gone:
            self._gone.add(peer)
            self._sources.fault(peer, fault)
        if peer in self._spares:
            self._spares.remove(peer)
        self._stop_source(peer)

    def _blame(self, liar: bytes) -> None:
        """Score a peer that sent wrong bytes, and fetch all its pieces again."""
        if liar in self._liars:
            return
        self._liars.add(liar)
        self._network.score(liar, "wrong-blob")
        self._sources.fault(liar, "wrong-blob")
        self._gone.add(liar)
        for assembly in self._assemblies.values():
            if not assembly.complete:
                self.scheduler.add(assembly.discard(liar))
        self._drop(liar, "wrong-blob")

    async def _watch(self) -> None:
        while True:
            await trio.sleep(self._settings.stall_floor / 4)
            for request in tuple(self._requests):
                if self._is_stalled(request, self._settings.stall_factor):
                    request.stalled = True
                    request.scope.cancel()

    def _is_stalled(self, request: PieceRequest, factor: float) -> bool:
        """Return whether a source's next step is too slow, compared with the others."""
        settings = self._settings
        others = self._sources.speed(peer for peer in self._active if peer != request.peer)
        patience = max(settings.stall_floor, factor * request.step_bytes / others) if others else math.inf
        idle = trio.current_time() - request.moved
        return not request.paused and idle > min(patience, settings.stall_cap)

    def _cancel(self, request: PieceRequest) -> None:
        """Cancel a request whose pieces came from others; half a stall makes it a stall."""
        request.stalled = self._is_stalled(request, self._settings.stall_factor / 2)
        request.scope.cancel()

    # Pieces

    async def _lane(self, peer: bytes) -> None:
        busy = 0
        while True:
            pieces = self._pick_pieces(peer)
            if not pieces:
                if not self.scheduler.empty and not self._is_worth_keeping(peer):
                    self._stop_source(peer)
                await self.scheduler.change()
                continue
            try:
                busy = 0 if await self._fetch(peer, pieces, self._writer) else busy + 1
            finally:
                self.scheduler.put_back(peer, pieces)
            if busy > len(BUSY_PAUSES):
                self._drop(peer, "refused")
            if busy:
                await trio.sleep(BUSY_PAUSES[busy - 1] * self._luck.uniform(0.5, 1.5))

    def _is_worth_keeping(self, peer: bytes) -> bool:
        """Return whether an idle source should stay, rather than make room."""
        held = self._holders[peer]
        if self._spares and self.scheduler.rarity and self.scheduler.unasked:
            return self.scheduler.has_unasked(held) or any(request.peer == peer for request in self._requests)
        return self.scheduler.wants_any(held)

    def _pick_pieces(self, peer: bytes) -> list[Piece]:
        held = self._holders[peer]
        if self._large and self._sources.may_have_port(peer):
            share = self.scheduler.left_bytes // (2 * LANES * max(1, len(self._active)))
            budget = min(max(share, self._settings.least_span), self._settings.span)
        else:
            speed = self._sources.of(peer).speed or 0.0
            budget = min(max(int(speed * REQUEST_GOAL_SECONDS), PIECE_BYTES), limits.READ_BYTES)
        return self.scheduler.take(peer, held, budget) or self.scheduler.take_again(
            peer, held, limits.READ_BYTES
        )

    async def _fetch(self, peer: bytes, pieces: list[Piece], intake: Intake) -> bool:
        """Read pieces from a source, and return False if it is busy. Drop it if it fails."""
        request = PieceRequest(peer, pieces)
        self._requests.add(request)
        began = trio.current_time()
        try:
            with request.scope:
                await self._reader.read(request, intake, large=self._large)
                seconds = trio.current_time() - began
                self._sources.delivered(peer, sum(piece.length for piece in pieces), seconds)
                return True
        except WrongBytesError:
            self._blame(peer)
        except WrongLengthError:
            self._drop(peer, "wrong-size")
        except RequestError as error:
            if error.reason == "busy":
                return False
            if error.reason == "left":
                self._failure = error
                self._over.set()
            self._drop(peer, FAULT_OF.get(error.reason, "gone"))
        except StoreError as error:
            self._failure = error
            self._over.set()
        except PeerError:  # at the bulk port, half-way: the connection may still be good for streams
            self._sources.no_port(peer)
        finally:
            self._requests.discard(request)
        if request.stalled:
            self._drop(peer, "stalled")
        return True

    def arrived(self, request: PieceRequest, piece: Piece, digest: bytes) -> None:
        """Record a written piece, and finalise its blob when that is complete."""
        assembly = self._assemblies[piece.blob]
        request.step(request.step_bytes)
        if request.peer in self._liars or not self.scheduler.done(piece):
            assembly.unclaim(piece)
            return
        assembly.credit(piece, digest, request.peer)
        self._progress(Progress(self._total - self.scheduler.left_bytes, self._total, len(self._active)))
        if assembly.complete:
            self._finalise_soon(assembly)
        for other in self._requests:
            if other is not request and not any(self.scheduler.is_open(each) for each in other.pieces):
                self._cancel(other)

    # Blobs

    def _finalise_soon(self, assembly: BlobAssembly) -> None:
        self._finalising += 1
        self._nursery.start_soon(self._finalise, assembly)

    async def _finalise(self, assembly: BlobAssembly) -> None:
        """Finalise a complete blob; if it is wrong, check sources until it is right."""
        try:
            if not (assembly.finish() if assembly.light else await trio.to_thread.run_sync(assembly.finish)):
                tried: set[bytes] = set()
                while not assembly.final and (checker := self._next_checker(assembly, tried)) is not None:
                    tried.add(checker)
                    await self._check_source(assembly, checker)
            if assembly.final:
                self._arrived(assembly.blob)
        except StoreError as error:
            self._failure = error
            self._over.set()
        self._finalising -= 1
        self._start_sources()

    def _next_checker(self, assembly: BlobAssembly, tried: set[bytes]) -> bytes | None:
        able = [
            peer
            for peer, held in self._holders.items()
            if assembly.blob in held and peer not in tried and peer not in self._gone
        ]
        return min(able, key=lambda peer: len(assembly.not_from(peer)), default=None)

    async def _check_source(self, assembly: BlobAssembly, checker: bytes) -> None:
        """Check one source against the assembled blob, and blame who sent wrong bytes."""
        check, needed = assembly.check_source(), assembly.not_from(checker)
        intake = _CheckIntake(check)
        for pause in (0.0, *BUSY_PAUSES):
            await trio.sleep(pause)
            left = [piece for piece in needed if piece not in intake.received]
            for at in range(0, len(left), limits.SLICES):
                await self._fetch(checker, left[at : at + limits.SLICES], intake)
            if len(intake.received) == len(needed) or checker in self._gone:
                break
        if len(intake.received) < len(needed):
            return
        liars = await trio.to_thread.run_sync(check.conclude)
        for liar in (checker,) if liars is None else liars:
            self._blame(liar)


class _PieceWriter:
    """Intake that writes pieces into their blobs and reports them to the download."""

    def __init__(self, download: Download, assemblies: dict[bytes, BlobAssembly]) -> None:
        self._download = download
        self._assemblies = assemblies
        self.light = all(assembly.partial.light for assembly in assemblies.values())

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        return self._assemblies[piece.blob].accept(piece, data)

    def count(self, request: PieceRequest, piece: Piece, digest: bytes) -> None:
        self._download.arrived(request, piece, digest)

    def undo(self, piece: Piece) -> None:
        self._assemblies[piece.blob].unclaim(piece)


class _CheckIntake:
    """Intake that compares a source's pieces with those that are here."""

    light = False

    def __init__(self, check: SourceCheck) -> None:
        self._check = check
        self.received: set[Piece] = set()

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes:
        return self._check.accept(piece, data)

    def count(self, request: PieceRequest, piece: Piece, digest: bytes) -> None:  # noqa: ARG002 - of no use here
        request.step(request.step_bytes)
        self.received.add(piece)

    def undo(self, piece: Piece) -> None:
        self.received.discard(piece)
