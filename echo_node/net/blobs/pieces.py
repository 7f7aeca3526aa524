"""What is still missing of a download, and who was asked for it. Rare blobs go out first, each whole; the last pieces twice.

It hands out and takes back, in the loop's thread alone. It knows neither bytes nor networks nor whether to believe.
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
"""The unit in which a large blob is asked for, written down and held against somebody."""
RUN_PIECES: Final = 4
"""Neighbours that stay together when pieces are shuffled: one read."""
ASKED_AT_ONCE: Final = 2
"""Of how many sources a piece is wanted in the end-game."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a blob that is had from one source; of a small blob, the whole."""

    blob: bytes
    offset: int
    length: int


def cut(blob: bytes, size: int) -> list[Piece]:
    """The pieces of a blob. One that fits into a single read is one piece, and so is proven by its own hash."""
    step = max(1, size) if size <= limits.READ_BYTES else PIECE_BYTES
    return [Piece(blob, at, min(step, size - at)) for at in range(0, size, step)]


def joined(pieces: Iterable[Piece]) -> list[Slice]:
    """Pieces as slices, neighbours as one. The order stays."""
    found: list[Slice] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last.blob == piece.blob and last.offset + last.length == piece.offset:
            found[-1] = Slice(piece.blob, last.offset, last.length + piece.length)
        else:
            found.append(Slice(piece.blob, piece.offset, piece.length))
    return found


def turns(blobs: Iterable[bytes], own: bytes, others: Collection[bytes]) -> dict[bytes, int]:
    """For each blob, how many of the others come before oneself in an order that all of them can work out.

    So those who want the same from one source ask it for different blobs first, without a word, and then trade.
    """

    def lot(peer: bytes, blob: bytes) -> bytes:
        return blake3(peer + blob).digest()

    return {blob: sum(lot(peer, blob) < lot(own, blob) for peer in others if peer != own) for blob in blobs}


class Board:
    """The pieces of one download."""

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        self._missing: dict[Piece, None] = {}
        self._asked: dict[Piece, list[bytes]] = {}
        """Pieces under way, oldest first, and whom they were asked of."""
        self._news = trio.Event()
        self._begun = set[bytes]()
        """Blobs of which something was asked: they are finished first, since a whole one can be passed on."""
        self.rarity: Mapping[bytes, int] = {}
        """How many peers hold a blob, as far as that is known."""
        self.turn: Mapping[bytes, int] = {}
        """How many others should be the first to ask for a blob, among equally rare ones: see `turns`."""
        self.left_bytes = 0
        self.asked_again = 0
        """How many pieces were asked of a second source."""

    def add(self, pieces: list[Piece]) -> None:
        """These are missing, too. What is missing is shuffled anew: the blobs, and runs of neighbours within them."""
        wanted = [*self._missing, *pieces]
        runs = [wanted[at : at + RUN_PIECES] for at in range(0, len(wanted), RUN_PIECES)]
        self._luck.shuffle(runs)
        shuffled = [piece for run in runs for piece in run]
        places: dict[bytes, int] = {}
        for piece in shuffled:
            places.setdefault(piece.blob, len(places))
        self._missing = dict.fromkeys(sorted(shuffled, key=lambda piece: places[piece.blob]))
        self.left_bytes += sum(piece.length for piece in pieces)
        self._tell()

    def take(self, peer: bytes, held: Collection[bytes], most_bytes: int) -> list[Piece]:
        """Pieces that this peer holds and nobody was asked for, at least one if there is one."""
        taken: list[Piece] = []
        for piece in self._in_turn(held):
            if len(taken) == limits.SLICES or (taken and piece.length > most_bytes):
                break
            taken.append(piece)
            most_bytes -= piece.length
        for piece in taken:
            del self._missing[piece]
            self._asked[piece] = [peer]
            self._begun.add(piece.blob)
        return taken

    def _in_turn(self, held: Collection[bytes]) -> Iterable[Piece]:
        able = (piece for piece in self._missing if piece.blob in held)
        rarity, turn, begun = self.rarity, self.turn, self._begun
        if not rarity and not turn:
            return able
        return sorted(
            able,
            key=lambda piece: (piece.blob not in begun, rarity.get(piece.blob, 0), turn.get(piece.blob, 0)),
        )

    def take_again(self, peer: bytes, held: Collection[bytes], most_bytes: int) -> list[Piece]:
        """The end-game: pieces that another source was asked for longest ago, and did not send yet.

        It begins when nothing else is missing: before, asking twice would take from others what they could be sent.
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
        """The peer will not send these any more. What arrived stays done."""
        for piece in pieces:
            askers = self._asked.get(piece)
            if askers is None or peer not in askers:
                continue
            askers.remove(peer)
            if not askers:
                del self._asked[piece]
                self._missing[piece] = None
        self._tell()

    def done(self, piece: Piece) -> bool:
        """The piece is here; False if it was already."""
        if piece not in self._missing and piece not in self._asked:
            return False
        self._missing.pop(piece, None)
        self._asked.pop(piece, None)
        self.left_bytes -= piece.length
        self._tell()
        return True

    def wants_any(self, held: Collection[bytes]) -> bool:
        """Whether anything of these blobs is missing or under way."""
        return any(piece.blob in held for pieces in (self._missing, self._asked) for piece in pieces)

    def lacks_any(self, held: Collection[bytes]) -> bool:
        """Whether anything of these blobs is missing that nobody was asked for."""
        return any(piece.blob in held for piece in self._missing)

    @property
    def lacks_some(self) -> bool:
        """Whether there is anything that nobody was asked for."""
        return bool(self._missing)

    def is_open(self, piece: Piece) -> bool:
        return piece in self._missing or piece in self._asked

    @property
    def empty(self) -> bool:
        """Whether nothing is missing and nothing under way."""
        return not self._missing and not self._asked

    def wake(self) -> None:
        """Something is known now that was not: let whoever waits look again."""
        self._tell()

    async def change(self) -> None:
        """Wait until something was added, put back or done."""
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()
