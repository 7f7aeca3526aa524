"""Assemble a blob from pieces of several peers, and find who sent wrong ones.

A blob's id is the hash of the whole alone. A blob of one piece is proven as it arrives. One of many
is proven when all are here; if it is wrong then, one source after the other is checked: it sends
the pieces that others had sent. If the blob is right with its pieces, every peer whose piece
differs lied; if it is wrong, that source lied. So no honest peer is ever blamed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from blake3 import blake3

from echo_node.errors import PeerError
from echo_node.net.blobs.partial_blob import PartialBlob, Place
from echo_node.net.blobs.piece_scheduler import Piece, cut
from protocol import limits


class WrongBytesError(PeerError):
    """Bytes that do not match their hash."""


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """A held piece: its hash, and its sender, or None if it was on disk before."""

    digest: bytes
    peer: bytes | None


class BlobAssembly:
    """One blob that is being assembled."""

    def __init__(self, blob: bytes, size: int, partial: PartialBlob) -> None:
        self.blob = blob
        self.size = size
        self.partial = partial
        self.pieces = cut(blob, size)
        self.final = False
        """Whether the blob is complete, verified and stored under its id."""
        self._received: dict[Place, ReceivedPiece] = {}
        self._claimed: set[Place] = set()
        self._lock = threading.Lock()

    def resume(self) -> int:
        """Take over pieces of an earlier download, and return their bytes. Blocks."""
        places = {(piece.offset, piece.length) for piece in self.pieces}
        found = {place: digest for place, digest in self.partial.present().items() if place in places}
        self._received = {place: ReceivedPiece(digest, None) for place, digest in found.items()}
        self._claimed = set(found)
        return sum(length for _, length in found)

    def missing(self) -> list[Piece]:
        return [piece for piece in self.pieces if _place(piece) not in self._received]

    @property
    def complete(self) -> bool:
        return len(self._received) == len(self.pieces)

    @property
    def light(self) -> bool:
        """Return whether `finish` is quick enough for the event loop."""
        return self.partial.light and self.size <= limits.GOSSIP_BYTES

    # These two run in threads, for several sources at once.

    def accept(self, piece: Piece, data: bytes | memoryview) -> bytes | None:
        """Write a piece and return its hash, or None if another sender was first.

        Raises `WrongBytesError` if the piece is the whole blob and its hash differs.
        """
        digest = blake3(data).digest()
        if piece.length == self.size and digest != self.blob:
            raise WrongBytesError("bytes that do not match their hash")
        with self._lock:
            if _place(piece) in self._claimed:
                return None
            self._claimed.add(_place(piece))
        try:
            self.partial.write(piece.offset, data, digest)
        except BaseException:
            self.unclaim(piece)
            raise
        return digest

    def unclaim(self, piece: Piece) -> None:
        """Let a written piece be written again."""
        with self._lock:
            if _place(piece) not in self._received:
                self._claimed.discard(_place(piece))

    def credit(self, piece: Piece, digest: bytes, peer: bytes) -> None:
        """Record a peer as the sender of an accepted piece."""
        self._received[_place(piece)] = ReceivedPiece(digest, peer)

    def discard(self, peer: bytes) -> list[Piece]:
        """Drop the pieces of a peer, and return them: they are missing again."""
        gone = [piece for piece in self.pieces if self._sender(piece) == peer]
        for piece in gone:
            del self._received[_place(piece)]
            self.unclaim(piece)
        return gone

    def finish(self) -> bool:
        """Store the blob under its id if its hash is right. Blocks."""
        self.final = self.partial.finish(self.blob)
        return self.final

    def not_from(self, peer: bytes) -> list[Piece]:
        """Return the pieces that a peer has to send to be checked."""
        return [piece for piece in self.pieces if self._sender(piece) != peer]

    def _sender(self, piece: Piece) -> bytes | None:
        received = self._received.get(_place(piece))
        return received.peer if received else None

    def check_source(self) -> SourceCheck:
        return SourceCheck(self, dict(self._received))


class SourceCheck:
    """The blob as one source has it: pieces that it sent before and sends now."""

    def __init__(self, assembly: BlobAssembly, received: dict[Place, ReceivedPiece]) -> None:
        self._whole = assembly
        self._received = received
        self._other: set[Place] = set()

    def accept(self, piece: Piece, data: bytes | memoryview) -> bytes:
        """Compare a piece with the one that is here, and keep both if they differ. Blocks."""
        digest = blake3(data).digest()
        if digest != self._received[_place(piece)].digest:
            self._whole.partial.write_other(piece.offset, data)
            self._other.add(_place(piece))
        return digest

    def conclude(self) -> frozenset[bytes] | None:
        """Return the peers that sent wrong pieces, or None if this source did. Blocks."""
        assembly = self._whole
        assembly.final = assembly.partial.finish(assembly.blob, self._other)
        if not assembly.final:
            return None
        return frozenset(peer for place in self._other if (peer := self._received[place].peer) is not None)


def _place(piece: Piece) -> Place:
    return piece.offset, piece.length
