"""Delta codec `gap8-ulp8-zstd1`: changes in a chunk of 16-bit weights. Lossless.

It sees weights as 16-bit patterns and never as numbers: zeros have signs and NaNs have payloads,
and both come through. A body has three columns: gaps between changed elements as bytes, steps
between patterns as zig-zag bytes, and the full patterns of those that went too far. Each change has
one body. Whether a delta is the right one, the hash of the chunk afterwards says.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol import limits, zstd
from protocol.errors import (
    InconsistentError,
    NotCanonicalError,
    OutOfRangeError,
    TrailingBytesError,
    TruncatedError,
    WrongTypeError,
)

DELTA_CODEC: Final = "gap8-ulp8-zstd1"
_SKIP: Final = 255
"""Gap byte: go on by 255 unchanged elements; the gap is not over."""
_ESCAPE: Final = 255
"""Step byte: the step is 255 or more in zig-zag, and the third column has the full pattern."""

Patterns = NDArray[np.uint16]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Changed elements of a chunk, ascending, and their new values. Fully checked."""

    positions: NDArray[np.uint32]
    values: Patterns

    def __len__(self) -> int:
        return len(self.positions)

    def write(self, chunk: Patterns) -> None:
        """Apply the change in place."""
        chunk[self.positions] = self.values


def encode_delta(base: Patterns, new: Patterns) -> bytes:
    """Encode the frame from one chunk to another; empty where they are the same.

    To squash several deltas, encode the one from the oldest base to the newest chunk.
    """
    _check_chunk(base)
    _check_chunk(new)
    if base.size != new.size:
        raise InconsistentError(f"chunks of {base.size} and {new.size} elements")
    columns = write_columns(base, new)
    return zstd.pack_columns(columns) if columns else b""


def decode_delta(frame: bytes, base: Patterns) -> Delta:
    """Decode what a frame changes in a chunk, which is only read.

    Every check is made here, so that no write can fail.
    """
    _check_chunk(base)
    if not frame:
        return Delta(np.empty(0, np.uint32), np.empty(0, np.uint16))
    return read_body(zstd.unpack(frame, most_body(base.size)), base)


def decode_positions(frame: bytes, elements: int) -> NDArray[np.uint32]:
    """Decode which elements a frame changes, without the base."""
    if not frame:
        return np.empty(0, np.uint32)
    body = zstd.unpack(frame, most_body(elements))
    return _positions(_gap_column(body), elements)


def write_columns(base: Patterns, new: Patterns) -> tuple[bytes, ...]:
    """Return the columns of a delta's body: gaps behind their number, steps, patterns.

    Empty where nothing changed.
    """
    positions = np.flatnonzero(base != new)
    if not positions.size:
        return ()
    values = new.take(positions)
    steps = _zigzag(values - base.take(positions))
    gaps = _gaps(positions)
    return (
        gaps.size.to_bytes(4, "little") + gaps.tobytes(),
        np.minimum(steps, _ESCAPE).astype(np.uint8).tobytes(),
        values[steps >= _ESCAPE].astype("<u2").tobytes(),
    )


def most_body(elements: int) -> int:
    """Return the longest body: every element changes, and none by a short step."""
    return 4 + 4 * elements


def read_body(body: bytes, base: Patterns) -> Delta:
    """Decode what a body changes, once it is out of its zstd frame."""
    gaps = _gap_column(body)
    positions = _positions(gaps, base.size)
    columns = np.frombuffer(body, np.uint8)[4 + gaps.size :]
    steps = columns[: positions.size]
    if steps.size < positions.size:
        raise TruncatedError(f"{steps.size} steps for {positions.size} changes")
    if not steps.all():
        raise NotCanonicalError("a step of zero")
    escaped = np.flatnonzero(steps == _ESCAPE)
    rest = columns[steps.size :]
    if rest.size < 2 * escaped.size:
        raise TruncatedError(f"{rest.size} bytes for {escaped.size} full patterns")
    if rest.size > 2 * escaped.size:
        raise TrailingBytesError("bytes behind the last column")
    values = base.take(positions, mode="clip")  # they are in bounds; "clip" saves looking again
    if escaped.size:
        full = rest.view("<u2").astype(np.uint16)
        if int(_zigzag(full - values[escaped]).min()) < _ESCAPE:
            raise NotCanonicalError("a full pattern where a short step leads")
    wide = steps.astype(np.uint16)
    values += (wide >> 1) ^ -(wide & 1)  # zig-zag undone, modulo 2^16
    if escaped.size:
        values[escaped] = full
    return Delta(positions, values)


def _gap_column(body: bytes) -> NDArray[np.uint8]:
    length = int.from_bytes(body[:4], "little")
    if len(body) < 4 + length:
        raise TruncatedError("a body that ends within its gaps")
    if length == 0:
        raise NotCanonicalError("a change of nothing, for which there is no frame")
    return np.frombuffer(body, np.uint8)[4 : 4 + length]


def _gaps(positions: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Encode the unchanged runs before changed elements: skips of 255, then rest."""
    gaps = np.diff(positions, prepend=-1) - 1
    if int(gaps.max()) < _SKIP:
        return gaps.astype(np.uint8)
    skips, rests = np.divmod(gaps, _SKIP)
    column = np.full(gaps.size + int(skips.sum()), _SKIP, np.uint8)
    column[np.cumsum(skips + 1) - 1] = rests
    return column


def _positions(gaps: NDArray[np.uint8], elements: int) -> NDArray[np.uint32]:
    """Decode the changed elements.

    Each byte goes on by at least one, so that no sum can pass 2^32 within these bounds.
    """
    if gaps.size > elements:
        raise OutOfRangeError(f"{gaps.size} gap bytes for {elements} elements")
    if gaps[-1] == _SKIP:
        raise TruncatedError("a gap that ends with a skip")
    ends = gaps != _SKIP
    reached: NDArray[np.uint32] = np.add(gaps, ends, dtype=np.uint32)
    np.cumsum(reached, out=reached)
    if int(reached[-1]) > elements:
        raise OutOfRangeError(f"a change beyond the last of {elements} elements")
    positions: NDArray[np.uint32] = reached[ends]
    positions -= 1
    return positions


def _zigzag(steps: Patterns) -> Patterns:
    """Map steps modulo 2^16 to zig-zag: 0, −1, 1, −2, 2 become 0, 1, 2, 3, 4."""
    signed = steps.view(np.int16)
    return ((signed << 1) ^ (signed >> 15)).view(np.uint16)


def _check_chunk(chunk: Patterns) -> None:
    if chunk.dtype != np.uint16 or chunk.ndim != 1:
        raise WrongTypeError(f"a chunk is a row of 16-bit patterns, not {chunk.ndim}-d {chunk.dtype}")
    if chunk.size > limits.CHUNK_ELEMENTS:
        raise OutOfRangeError(f"a chunk of {chunk.size} elements, of at most {limits.CHUNK_ELEMENTS}")
