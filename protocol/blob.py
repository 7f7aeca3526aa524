"""Blob exchange: want-lists, slices over a stream, and a bulk port for large ones.

These are questions and answers between two nodes that know each other's keys from their connection,
so none is sealed: the answers are proven by the hashes that were asked for.
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
    """Question which of these blobs the peer holds: concatenated ids."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    blobs: Annotated[bytes, blob(DIGEST_BYTES * limits.WANTS, DIGEST_BYTES, DIGEST_BYTES)]

    @classmethod
    def of(cls, blobs: Iterable[bytes]) -> BlobWants:
        return cls(b"".join(blobs))

    def ids(self) -> list[bytes]:
        return [self.blobs[at : at + DIGEST_BYTES] for at in range(0, len(self.blobs), DIGEST_BYTES)]


@record
class BlobHoldings:
    """Size of each blob of a want-list, in its order; None where it is not held."""

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    sizes: Annotated[tuple[int | None, ...], array(optional(uint()), limits.WANTS, 1)]


@row
class Slice:
    """Byte range of a blob."""

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
    """Request to send these slices on this stream, one after the other."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    slices: Slices

    def check(self) -> None:
        _check_total(self.slices, limits.READ_BYTES)


@record
class BulkAsk:
    """Request to offer these slices in order at a port beside the connection."""

    LIMIT: ClassVar[int] = limits.SLICES_BYTES

    slices: Slices

    def check(self) -> None:
        _check_total(self.slices, limits.BULK_BYTES)


@record
class BulkOffer:
    """Bulk port at the connection's address, its certificate's SHA-256, and a token.

    The token is valid once, for so many seconds, for the peer that asked and for what it asked.
    """

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    pin: Digest
    port: Annotated[int, uint(65_535, 1)]
    seconds: Annotated[int, uint(limits.BULK_SECONDS, 1)]
    token: Digest


def bulk_pass(token: bytes, asker: bytes, ask: BulkAsk) -> bytes:
    """Return the pass for the bulk port: the token, bound to the peer and the request."""
    return derive("bulk", token, asker, encode(ask))
