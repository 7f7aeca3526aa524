"""Blobs by their hash: who holds which, slices of them over a stream, and a door of its own for the large ones.

The types are questions and answers between two nodes that know each other's keys from their connection, so none is
sealed: what answers them is proven by the hashes that were asked for. It knows nothing of what blobs hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from protocol import limits
from protocol.digest import DIGEST_BYTES, derive
from protocol.errors import InconsistentError
from protocol.fields import Counter, Digest, array, blob, optional, uint
from protocol.wire import encode, of, record, row


@record
class BlobWants:
    """Which of these do you hold? Ids in a row."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    blobs: Annotated[bytes, blob(DIGEST_BYTES * limits.WANTS, DIGEST_BYTES, DIGEST_BYTES)]

    @classmethod
    def of(cls, blobs: Iterable[bytes]) -> BlobWants:
        return cls(b"".join(blobs))

    def ids(self) -> list[bytes]:
        return [self.blobs[at : at + DIGEST_BYTES] for at in range(0, len(self.blobs), DIGEST_BYTES)]


@record
class BlobHoldings:
    """For each blob of a want-list, in its order: how many bytes it has, or none if it is not held."""

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    sizes: Annotated[tuple[int | None, ...], array(optional(uint()), limits.WANTS, 1)]


@row
class Slice:
    """Some bytes of a blob."""

    blob: Digest
    offset: Counter
    length: Annotated[int, uint(limits.BULK_BYTES, 1)]


Slices = Annotated[tuple[Slice, ...], array(of(Slice), limits.SLICES, 1)]


def _check_total(slices: tuple[Slice, ...], most: int) -> None:
    total = sum(each.length for each in slices)
    if total > most:
        raise InconsistentError(f"{total} bytes together, at most {most} are allowed", "slices")


@record
class BlobRead:
    """Send these bytes on this stream, one slice after the other and nothing else."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    slices: Slices

    def check(self) -> None:
        _check_total(self.slices, limits.READ_BYTES)


@record
class BulkAsk:
    """Offer these bytes, one slice after the other, at a door beside this connection."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    slices: Slices

    def check(self) -> None:
        _check_total(self.slices, limits.BULK_BYTES)


@record
class BulkOffer:
    """The door: a port at the address of this connection, the SHA-256 of the certificate shown there, and a token.

    The token opens it once, within so many seconds, for the peer that asked and for what it asked.
    """

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    pin: Digest
    port: Annotated[int, uint(65_535, 1)]
    seconds: Annotated[int, uint(limits.BULK_SECONDS, 1)]
    token: Digest


def bulk_pass(token: bytes, asker: bytes, ask: BulkAsk) -> bytes:
    """What is said at the door: the token, bound to who asked and to what was asked."""
    return derive("bulk", token, asker, encode(ask))
