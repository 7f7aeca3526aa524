"""Compact columns of token ids and log-probabilities.

A column of ids takes `bits` bits an id, the width of the run's vocabulary; a log-probability takes
three bytes, in steps of 2^-18 down to -64. At a vocabulary of 152k that is 5.25 bytes a token, with
importance weights good to 2e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol import limits
from protocol.errors import InconsistentError, OutOfRangeError

LOGPROB_BYTES: Final = 3
_STEPS: Final = 2.0**18
_FLOOR: Final = 2**24 - 1


def pack_ids(ids: Sequence[int] | NDArray[np.integer], vocabulary: int) -> bytes:
    """Pack ids at a vocabulary's width, first in the lowest bits; padding is 0."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < vocabulary:
        raise OutOfRangeError(f"an id that is not between 0 and {vocabulary - 1}", "tokens")
    flat = np.unpackbits(array.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(flat[:, : bits_for(vocabulary)], bitorder="little").tobytes()


def unpack_ids(packed: bytes, count: int, bits: int) -> NDArray[np.int64]:
    """Unpack the ids."""
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=bits * count, bitorder="little")
    wide = np.zeros((count, 32), np.uint8)
    wide[:, :bits] = flat.reshape(count, bits)
    return np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)


def check_packed(packed: bytes, count: int, bits: int, where: str) -> None:
    """Raise unless these bytes are `count` ids of `bits` bits and nothing else."""
    used = bits * count
    if len(packed) != (used + 7) // 8:
        raise InconsistentError(f"{count} ids of {bits} bits do not take {len(packed)} bytes", where)
    if used % 8 and packed[-1] >> used % 8:
        raise InconsistentError("unused bits that are not zero", where)


def bits_for(vocabulary: int) -> int:
    """Return the width of a vocabulary's ids in bits."""
    if not 1 <= vocabulary <= 1 << limits.VOCABULARY_BITS:
        raise OutOfRangeError(f"a vocabulary of {vocabulary}, not of 1 to 2^{limits.VOCABULARY_BITS}")
    return max(1, (vocabulary - 1).bit_length())


def pack_logprobs(values: ArrayLike) -> bytes:
    """Pack log-probabilities in three bytes each, lowest first.

    A value is a multiple of -2^-18, at most 2^24 - 1 of them.
    """
    array = np.asarray(values, dtype=np.float64)
    if np.isnan(array).any() or (array > 0).any():
        raise OutOfRangeError("a log-probability that is not a number of at most 0", "logprobs")
    steps = np.minimum(np.rint(-array * _STEPS), _FLOOR).astype("<u4")
    return steps.view(np.uint8).reshape(-1, 4)[:, :LOGPROB_BYTES].tobytes()


def unpack_logprobs(packed: bytes) -> NDArray[np.float64]:
    """Unpack the log-probabilities."""
    wide = np.zeros((len(packed) // LOGPROB_BYTES, 4), np.uint8)
    wide[:, :LOGPROB_BYTES] = np.frombuffer(packed, np.uint8).reshape(-1, LOGPROB_BYTES)
    return -(wide.view("<u4").reshape(-1).astype(np.float64)) / _STEPS + 0.0
