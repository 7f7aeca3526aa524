"""One round of a download: pieces from up to four sources at once, until all is here or nobody is left to ask.

Who is faster is given more. Who stalls, lies or goes is let go, and the next takes the place; the last pieces are asked
of two. It knows what is wanted and who says to hold it; how that came to be known, and what is tried next, it does not.
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
from echo_node.net.blobs.pieces import PIECE_BYTES, Board, Piece
from echo_node.net.blobs.reading import Errand, Intake, Reader, WrongLengthError
from echo_node.net.blobs.sources import Fault, Sources
from echo_node.net.blobs.wholes import LieError, Testimony, Whole
from protocol import limits

LANES: Final = 2
"""Errands of one source at once, so that it sends while the next question is on its way."""
REQUEST_GOAL_SECONDS: Final = 0.5
"""How long a read should take: a slow source is asked for less."""
BUSY_PAUSES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
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
    """How a download goes about it."""

    sources: int = 4
    bulk_from: int = 32 * 1024 * 1024
    """From how many bytes on the doors are used: a door costs a question, a dial and a handshake, four round trips,
    which are worth it when there are some seconds of a stream to save."""
    span: int = 64 * 1024 * 1024
    """At most so much is asked for at a door at once."""
    least_span: int = 8 * 1024 * 1024
    stall_floor: float = 5.0
    """Nobody is called stalled before so many seconds,"""
    stall_factor: float = 8.0
    """nor before so many times what the others would have taken,"""
    stall_cap: float = 30.0
    """but after so many seconds without a byte always."""
    renew_seconds: float = 1.0
    """How often peers are asked anew what they hold while a large download is under way: they are downloading, too."""
    round_pauses: tuple[float, ...] = (0.2, 1.0, 3.0)
    """How long to wait after rounds that got nowhere; after the last one the download is given up."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is, for people and metrics."""

    done: int
    total: int
    sources: int


class Download:
    """One round. `run` it once."""

    def __init__(
        self,
        network: Network,
        sources: Sources,
        reader: Reader,
        settings: DownloadSettings,
        wholes: Collection[Whole],
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
        self._wholes = {whole.blob: whole for whole in wholes}
        self._holders = holders
        self._spares = sources.in_order(holders)
        self._active: dict[bytes, trio.CancelScope] = {}
        self._gone: set[bytes] = set()
        self._liars: set[bytes] = set()
        self._failure: EchoError | None = None
        self._errands: set[Errand] = set()
        self._settling = 0
        self._progress = progress
        self._arrived = arrived
        self._luck = luck
        self._over = trio.Event()
        self.board = Board(luck)
        self.board.add([piece for whole in wholes for piece in whole.missing()])
        self._keeping = _Keeping(self, self._wholes)
        self._total = sum(whole.size for whole in wholes)
        self._large = self.board.left_bytes >= settings.bulk_from

    async def run(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Return when every blob is settled, or when no source is left that could help.

        `meanwhile` is done until then: it may `renew` what is known of the holders.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if meanwhile is not None:
                nursery.start_soon(meanwhile)
            for whole in self._wholes.values():
                if whole.complete:
                    self._settle_soon(whole)
            nursery.start_soon(self._watch)
            self._hire()
            await self._over.wait()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    # Sources

    def renew(self, holders: dict[bytes, frozenset[bytes]]) -> None:
        """Peers hold more than they did, or others hold something as well."""
        for peer, held in holders.items():
            self._holders[peer] = held
            if peer not in self._active and peer not in self._gone and peer not in self._spares:
                self._spares.append(peer)
        self.board.rarity = Counter(blob for held in self._holders.values() for blob in held)
        self.board.wake()
        self._hire()

    def _hire(self) -> None:
        """Put sources to work up to their number; end the round if there is neither work nor anybody to do it."""
        while self._spares and len(self._active) < self._settings.sources and not self.board.empty:
            peer = self._spares.pop(0)
            if not self.board.wants_any(self._holders[peer]):
                continue
            self._active[peer] = scope = trio.CancelScope()
            self._nursery.start_soon(self._employ, peer, scope)
        if not self._settling and (self.board.empty or not self._active):
            self._over.set()

    async def _employ(self, peer: bytes, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for _ in range(LANES):
                    nursery.start_soon(self._lane, peer)

    def _retire(self, peer: bytes) -> None:
        """There is nothing to do for this source; another may have what is left."""
        if peer in self._active:
            self._active.pop(peer).cancel()
        self._hire()

    def _let_go(self, peer: bytes, fault: Fault) -> None:
        """This source failed: no more of it in this round."""
        if peer not in self._gone:
            self._gone.add(peer)
            self._sources.fault(peer, fault)
        if peer in self._spares:
            self._spares.remove(peer)
        self._retire(peer)

    def _expose(self, liar: bytes) -> None:
        """A proven lie: it is held against the peer, and whatever else it gave is fetched again."""
        if liar in self._liars:
            return
        self._liars.add(liar)
        self._network.score(liar, "wrong-blob")
        self._sources.fault(liar, "wrong-blob")
        self._gone.add(liar)
        for whole in self._wholes.values():
            if not whole.complete:
                self.board.add(whole.forget(liar))
        self._let_go(liar, "wrong-blob")

    async def _watch(self) -> None:
        while True:
            await trio.sleep(self._settings.stall_floor / 4)
            for errand in tuple(self._errands):
                if self._is_stalled(errand, self._settings.stall_factor):
                    errand.stalled = True
                    errand.scope.cancel()

    def _is_stalled(self, errand: Errand, factor: float) -> bool:
        """Whether this source takes too long for its next step, seen how fast the others are."""
        settings = self._settings
        others = self._sources.speed(peer for peer in self._active if peer != errand.peer)
        patience = max(settings.stall_floor, factor * errand.step_bytes / others) if others else math.inf
        idle = trio.current_time() - errand.moved
        return not errand.paused and idle > min(patience, settings.stall_cap)

    def _call_off(self, errand: Errand) -> None:
        """Others brought all of it. Who was asked first and is beaten by so much has stalled as well."""
        errand.stalled = self._is_stalled(errand, self._settings.stall_factor / 2)
        errand.scope.cancel()

    # Pieces

    async def _lane(self, peer: bytes) -> None:
        busy = 0
        while True:
            pieces = self._choose(peer)
            if not pieces:
                if not self.board.empty and not self._may_help(peer):
                    self._retire(peer)
                await self.board.change()
                continue
            try:
                busy = 0 if await self._fetch(peer, pieces, self._keeping) else busy + 1
            finally:
                self.board.put_back(peer, pieces)
            if busy > len(BUSY_PAUSES):
                self._let_go(peer, "refused")
            if busy:
                await trio.sleep(BUSY_PAUSES[busy - 1] * self._luck.uniform(0.5, 1.5))

    def _may_help(self, peer: bytes) -> bool:
        """Whether a source without work is worth keeping: not where another could go on, and it will be heard of again."""
        held = self._holders[peer]
        if self._spares and self.board.rarity and self.board.lacks_some:
            return self.board.lacks_any(held) or any(errand.peer == peer for errand in self._errands)
        return self.board.wants_any(held)

    def _choose(self, peer: bytes) -> list[Piece]:
        held = self._holders[peer]
        if self._large and self._sources.may_have_port(peer):
            share = self.board.left_bytes // (2 * LANES * max(1, len(self._active)))
            budget = min(max(share, self._settings.least_span), self._settings.span)
        else:
            speed = self._sources.of(peer).speed or 0.0
            budget = min(max(int(speed * REQUEST_GOAL_SECONDS), PIECE_BYTES), limits.READ_BYTES)
        return self.board.take(peer, held, budget) or self.board.take_again(peer, held, limits.READ_BYTES)

    async def _fetch(self, peer: bytes, pieces: list[Piece], intake: Intake) -> bool:
        """Read pieces from a source. False if it should be asked again a little later; it is let go if it fails."""
        errand = Errand(peer, pieces)
        self._errands.add(errand)
        began = trio.current_time()
        try:
            with errand.scope:
                await self._reader.read(errand, intake, large=self._large)
                seconds = trio.current_time() - began
                self._sources.delivered(peer, sum(piece.length for piece in pieces), seconds)
                return True
        except LieError:
            self._expose(peer)
        except WrongLengthError:
            self._let_go(peer, "wrong-size")
        except RequestError as error:
            if error.reason == "busy":
                return False
            if error.reason == "left":
                self._failure = error
                self._over.set()
            self._let_go(peer, FAULT_OF.get(error.reason, "gone"))
        except StoreError as error:
            self._failure = error
            self._over.set()
        except PeerError:  # at the door, half-way: the connection may still be good for streams
            self._sources.no_port(peer)
        finally:
            self._errands.discard(errand)
        if errand.stalled:
            self._let_go(peer, "stalled")
        return True

    def arrived(self, errand: Errand, piece: Piece, digest: bytes) -> None:
        """A piece was written down."""
        whole = self._wholes[piece.blob]
        errand.step(errand.step_bytes)
        if errand.peer in self._liars or not self.board.done(piece):
            whole.unclaim(piece)
            return
        whole.credit(piece, digest, errand.peer)
        self._progress(Progress(self._total - self.board.left_bytes, self._total, len(self._active)))
        if whole.complete:
            self._settle_soon(whole)
        for other in self._errands:
            if other is not errand and not any(self.board.is_open(each) for each in other.pieces):
                self._call_off(other)

    # Wholes

    def _settle_soon(self, whole: Whole) -> None:
        self._settling += 1
        self._nursery.start_soon(self._settle, whole)

    async def _settle(self, whole: Whole) -> None:
        """Make a complete blob final; if it is wrong, let sources vouch until it is right or none is left."""
        try:
            if not (whole.finish() if whole.light else await trio.to_thread.run_sync(whole.finish)):
                tried: set[bytes] = set()
                while not whole.settled and (voucher := self._next_voucher(whole, tried)) is not None:
                    tried.add(voucher)
                    await self._hear(whole, voucher)
            if whole.settled:
                self._arrived(whole.blob)
        except StoreError as error:
            self._failure = error
            self._over.set()
        self._settling -= 1
        self._hire()

    def _next_voucher(self, whole: Whole, tried: set[bytes]) -> bytes | None:
        able = [
            peer
            for peer, held in self._holders.items()
            if whole.blob in held and peer not in tried and peer not in self._gone
        ]
        return min(able, key=lambda peer: len(whole.not_from(peer)), default=None)

    async def _hear(self, whole: Whole, voucher: bytes) -> None:
        """Have one source vouch for the whole, and draw the conclusion."""
        testimony, needed = whole.vouch(), whole.not_from(voucher)
        hearing = _Hearing(testimony)
        for pause in (0.0, *BUSY_PAUSES):
            await trio.sleep(pause)
            left = [piece for piece in needed if piece not in hearing.heard]
            for at in range(0, len(left), limits.SLICES):
                await self._fetch(voucher, left[at : at + limits.SLICES], hearing)
            if len(hearing.heard) == len(needed) or voucher in self._gone:
                break
        if len(hearing.heard) < len(needed):
            return
        liars = await trio.to_thread.run_sync(testimony.judge)
        for liar in (voucher,) if liars is None else liars:
            self._expose(liar)


class _Keeping:
    """Pieces go where they belong, and are counted."""

    def __init__(self, download: Download, wholes: dict[bytes, Whole]) -> None:
        self._download = download
        self._wholes = wholes
        self.light = all(whole.draft.light for whole in wholes.values())

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        return self._wholes[piece.blob].accept(piece, data)

    def count(self, errand: Errand, piece: Piece, digest: bytes) -> None:
        self._download.arrived(errand, piece, digest)

    def undo(self, piece: Piece) -> None:
        self._wholes[piece.blob].unclaim(piece)


class _Hearing:
    """Pieces are compared with those that are here, to judge who lies."""

    light = False

    def __init__(self, testimony: Testimony) -> None:
        self._testimony = testimony
        self.heard: set[Piece] = set()

    def write(self, piece: Piece, data: bytes | memoryview) -> bytes:
        return self._testimony.accept(piece, data)

    def count(self, errand: Errand, piece: Piece, digest: bytes) -> None:  # noqa: ARG002 - of no use here
        errand.step(errand.step_bytes)
        self.heard.add(piece)

    def undo(self, piece: Piece) -> None:
        self.heard.discard(piece)
