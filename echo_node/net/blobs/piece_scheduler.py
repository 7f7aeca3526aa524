"""Missing pieces of a download, and which sources were asked for them.

Rare blobs go first, each whole; the last pieces are requested from two sources. Used in the event
loop only.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import trio
from blake3 import blake3

from protocol import limits
from protocol.blob import Slice

PIECE_BYTES: Final = 1024 * 1024
"""Bytes in which a large blob is requested, written and attributed to a sender."""
RUN_PIECES: Final = 4
"""Neighbouring pieces that stay together when shuffled: one read."""
ASKED_AT_ONCE: Final = 2
"""Sources that a piece is requested from in the end-game."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a blob that comes from one source; of a small blob, the whole."""

    blob: bytes
    offset: int
    length: int


def cut(blob: bytes, size: int) -> list[Piece]:
    """Cut a blob into pieces; one if it fits a read, verified by its own hash."""
    step = max(1, size) if size <= limits.READ_BYTES else PIECE_BYTES
    return [Piece(blob, at, min(step, size - at)) for at in range(0, size, step)]


def joined(pieces: Iterable[Piece]) -> list[Slice]:
    """Return pieces as slices in the same order, with neighbours merged."""
    found: list[Slice] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last.blob == piece.blob and last.offset + last.length == piece.offset:
            found[-1] = Slice(piece.blob, last.offset, last.length + piece.length)
        else:
            found.append(Slice(piece.blob, piece.offset, piece.length))
    return found


def turns(blobs: Iterable[bytes], own: bytes, others: Collection[bytes]) -> dict[bytes, int]:
    """Return for each blob how many of the others rank before oneself, by hash.

    So peers that want the same blobs from one source ask it for different ones first, and then
    trade.
    """

    def lot(peer: bytes, blob: bytes) -> bytes:
        return blake3(peer + blob).digest()

    return {blob: sum(lot(peer, blob) < lot(own, blob) for peer in others if peer != own) for blob in blobs}


class PieceScheduler:
    """Schedules the pieces of one download."""

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        self._missing: dict[Piece, None] = {}
        self._asked: dict[Piece, list[bytes]] = {}
        """Requested pieces, oldest first, with the sources that were asked."""
        self._news = trio.Event()
        self._begun = set[bytes]()
        """Blobs with a requested piece: finished first, since a whole one can be passed on."""
        self.rarity: Mapping[bytes, int] = {}
        """Known holders by blob."""
        self.turn: Mapping[bytes, int] = {}
        """Order among equally rare blobs: see `turns`."""
        self.left_bytes = 0
        self.asked_again = 0
        """Pieces requested from a second source, in total."""

    def add(self, pieces: list[Piece]) -> None:
        """Add missing pieces, and shuffle blobs and runs of neighbours anew."""
        wanted = [*self._missing, *pieces]
        runs = [wanted[at : at + RUN_PIECES] for at in range(0, len(wanted), RUN_PIECES)]
        self._luck.shuffle(runs)
        shuffled = [piece for run in runs for piece in run]
        places: dict[bytes, int] = {}
        for piece in shuffled:
            places.setdefault(piece.blob, len(places))
        self._missing = dict.fromkeys(sorted(shuffled, key=lambda piece: places[piece.blob]))
        self.left_bytes += sum(piece.length for piece in pieces)
        self.notify()

    def take(self, peer: bytes, held: Collection[bytes], most_bytes: int) -> list[Piece]:
        """Take pieces that a peer holds and no source was asked for."""
        taken: list[Piece] = []
        for piece in self._in_order(held):
            if len(taken) == limits.SLICES or (taken and piece.length > most_bytes):
                break
            taken.append(piece)
            most_bytes -= piece.length
        for piece in taken:
            del self._missing[piece]
            self._asked[piece] = [peer]
            self._begun.add(piece.blob)
        return taken

    def _in_order(self, held: Collection[bytes]) -> Iterable[Piece]:
        able = (piece for piece in self._missing if piece.blob in held)
        rarity, turn, begun = self.rarity, self.turn, self._begun
        if not rarity and not turn:
            return able
        return sorted(
            able,
            key=lambda piece: (piece.blob not in begun, rarity.get(piece.blob, 0), turn.get(piece.blob, 0)),
        )

    def take_again(self, peer: bytes, held: Collection[bytes], most_bytes: int) -> list[Piece]:
        """Take pieces for the end-game: those requested elsewhere longest ago.

        Returns none while others are missing: a second request would waste upload bandwidth.
        """
        taken: list[Piece] = []
        if self._missing and self.rarity:
            return taken
        for piece, askers in self._asked.items():
            if len(taken) == limits.SLICES or (taken and piece.length > most_bytes):
                break
            if peer not in askers and len(askers) < ASKED_AT_ONCE and piece.blob in held:
                taken.append(piece)
                most_bytes -= piece.length
        for piece in taken:
            self._asked[piece].append(peer)
        self.asked_again += len(taken)
        return taken

    def put_back(self, peer: bytes, pieces: Iterable[Piece]) -> None:
        """Return pieces that a peer will not send; those that arrived stay done."""
        for piece in pieces:
            askers = self._asked.get(piece)
            if askers is None or peer not in askers:
                continue
            askers.remove(peer)
            if not askers:
                del self._asked[piece]
                self._missing[piece] = None
        self.notify()

    def done(self, piece: Piece) -> bool:
        """Mark a piece as arrived; return False if it was already."""
        if piece not in self._missing and piece not in self._asked:
            return False
        self._missing.pop(piece, None)
        self._asked.pop(piece, None)
        self.left_bytes -= piece.length
        self.notify()
        return True

    def wants_any(self, held: Collection[bytes]) -> bool:
        """Return whether a piece of these blobs is missing or requested."""
        return any(piece.blob in held for pieces in (self._missing, self._asked) for piece in pieces)

    def has_unasked(self, held: Collection[bytes]) -> bool:
        """Return whether a piece of these blobs is missing and was not requested."""
        return any(piece.blob in held for piece in self._missing)

    @property
    def unasked(self) -> bool:
        """Return whether a piece is missing that was not requested."""
        return bool(self._missing)

    def is_open(self, piece: Piece) -> bool:
        return piece in self._missing or piece in self._asked

    @property
    def empty(self) -> bool:
        """Return whether no piece is missing or requested."""
        return not self._missing and not self._asked

    async def change(self) -> None:
        """Wait until a piece was added, put back or done."""
        await self._news.wait()

    def notify(self) -> None:
        """Wake those that wait for a change."""
        self._news.set()
        self._news = trio.Event()
