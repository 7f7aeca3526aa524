"""A blob that is being put together, and who gave which piece of it: so that a lie has an author.

The id of a blob names the whole alone. A blob of one piece is proven as it arrives. One of many is proven when all are
there; if it is wrong then, one source after the other vouches for the whole by giving the pieces that it had not given.
A whole that is right convicts everybody whose piece was another; a whole that is wrong convicts who vouched for it. So
nobody honest is ever blamed. It knows no network.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from blake3 import blake3

from echo_node.errors import PeerError
from echo_node.net.blobs.drafts import Draft, Place
from echo_node.net.blobs.pieces import Piece, cut
from protocol import limits


class LieError(PeerError):
    """Other bytes than those that the hash names."""


@dataclass(frozen=True, slots=True)
class Given:
    """A piece that is here: its hash as it arrived, and who sent it; nobody, if it was here from earlier."""

    digest: bytes
    peer: bytes | None


class Whole:
    """One blob in the making."""

    def __init__(self, blob: bytes, size: int, draft: Draft) -> None:
        self.blob = blob
        self.size = size
        self.draft = draft
        self.pieces = cut(blob, size)
        self.settled = False
        """Whether it is complete, right and final."""
        self._given: dict[Place, Given] = {}
        self._claimed: set[Place] = set()
        self._lock = threading.Lock()

    def resume(self) -> int:
        """Take what is here from earlier. Blocks. How many bytes that is."""
        places = {(piece.offset, piece.length) for piece in self.pieces}
        found = {place: digest for place, digest in self.draft.present().items() if place in places}
        self._given = {place: Given(digest, None) for place, digest in found.items()}
        self._claimed = set(found)
        return sum(length for _, length in found)

    def missing(self) -> list[Piece]:
        return [piece for piece in self.pieces if _place(piece) not in self._given]

    @property
    def complete(self) -> bool:
        return len(self._given) == len(self.pieces)

    @property
    def light(self) -> bool:
        """Whether it takes no time to speak of to make it final."""
        return self.draft.light and self.size <= limits.GOSSIP_BYTES

    # These two run in threads, for several sources at once.

    def accept(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        """Write a piece down; its hash, or none if it came too late. Raises `LieError` where one piece is all."""
        digest = blake3(data).digest()
        if piece.length == self.size and digest != self.blob:
            raise LieError("other bytes than their hash names")
        with self._lock:
            if _place(piece) in self._claimed:
                return None
            self._claimed.add(_place(piece))
        try:
            self.draft.write(piece.offset, data, digest)
        except BaseException:
            self.unclaim(piece)
            raise
        return digest

    def unclaim(self, piece: Piece) -> None:
        """What was written does not count after all."""
        with self._lock:
            if _place(piece) not in self._given:
                self._claimed.discard(_place(piece))

    def credit(self, piece: Piece, digest: bytes, peer: bytes) -> None:
        """A piece that was accepted is this peer's."""
        self._given[_place(piece)] = Given(digest, peer)

    def forget(self, peer: bytes) -> list[Piece]:
        """Let go of what a peer gave. These pieces are missing again."""
        gone = [piece for piece in self.pieces if self._giver(piece) == peer]
        for piece in gone:
            del self._given[_place(piece)]
            self.unclaim(piece)
        return gone

    def finish(self) -> bool:
        """Make it final if it is right. Blocks."""
        self.settled = self.draft.finish(self.blob)
        return self.settled

    def not_from(self, peer: bytes) -> list[Piece]:
        """What a peer has to give to vouch for the whole."""
        return [piece for piece in self.pieces if self._giver(piece) != peer]

    def _giver(self, piece: Piece) -> bytes | None:
        given = self._given.get(_place(piece))
        return given.peer if given else None

    def vouch(self) -> Testimony:
        return Testimony(self, dict(self._given))


class Testimony:
    """The whole as one source tells it: what it gave before, and what it gives now."""

    def __init__(self, whole: Whole, given: dict[Place, Given]) -> None:
        self._whole = whole
        self._given = given
        self._other: set[Place] = set()

    def accept(self, piece: Piece, data: bytes | memoryview) -> bytes:
        """Compare a piece with the one that is here, and keep it beside that if it is another. Blocks."""
        digest = blake3(data).digest()
        if digest != self._given[_place(piece)].digest:
            self._whole.draft.write_other(piece.offset, data)
            self._other.add(_place(piece))
        return digest

    def judge(self) -> frozenset[bytes] | None:
        """The peers that lied, if what the source tells is right; none if it is the liar itself. Blocks."""
        whole = self._whole
        whole.settled = whole.draft.finish(whole.blob, self._other)
        if not whole.settled:
            return None
        return frozenset(peer for place in self._other if (peer := self._given[place].peer) is not None)


def _place(piece: Piece) -> Place:
    return piece.offset, piece.length
