"""Keyed randomness of sampling: slot keys, uniforms, draws and replay. Pure numpy.

Everything is keyed by the head under which is sampled, so that luck cannot be known before the head
exists, and a verifier with the same weights can replay any draw.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import ArrayLike, NDArray

from protocol.digest import derive
from protocol.identity import peer_id_bytes

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_PROMPT: Final = b"prompt"
_UNIFORM: Final = b"u"
FARTHEST: Final = 1e12
"""Largest z: that of a token that could not have been drawn at all."""
_RESOLUTION: Final = 2.0**-53


def beacon(head_id: bytes) -> bytes:
    """Return the public randomness of a head."""
    return derive("beacon", head_id)


def slot_key(run: bytes, head_id: bytes, sampler: bytes, slot: int) -> bytes:
    """Return the key of a sampler's slot under a head. `sampler` is its public key."""
    return derive("slot", run, beacon(head_id), peer_id_bytes(sampler), slot.to_bytes(8))


def prompt_key(slot: bytes) -> bytes:
    """Return the key from which the contract makes the slot's prompt."""
    return blake3(_PROMPT, key=slot).digest()


def uniforms(slot: bytes, completion: int, count: int, start: int = 0) -> Floats:
    """Return u[completion, start : start + count] in [0, 1), multiples of 2^-53."""
    stream = blake3(_UNIFORM + completion.to_bytes(4), key=slot)
    words = np.frombuffer(stream.digest(length=8 * count, seek=8 * start), "<u8")
    return (words >> np.uint64(11)).astype(np.float64) * _RESOLUTION


def probabilities(logits: ArrayLike, temperature: float) -> Floats:
    """Return the softmax at a temperature over the last axis, in float64.

    Pass only the first `vocab_size` logits.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    normalised: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return normalised


def draw(probability: Floats, u: ArrayLike) -> Ids:
    """Draw per row the least id whose cumulative probability exceeds u · sum.

    The sum is that of the row.
    """
    cumulative = np.cumsum(probability, axis=-1)
    targets = np.asarray(u, dtype=np.float64) * cumulative[..., -1]
    rows = zip(cumulative.reshape(-1, cumulative.shape[-1]), np.ravel(targets), strict=True)
    ids = [int(np.searchsorted(row, target, side="right")) for row, target in rows]
    return np.array(ids, dtype=np.int64).reshape(np.shape(targets))


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """Distance of each token's u from the claimed interval: plain, and scaled.

    The scale is the spread.
    """

    d: Floats
    z: Floats


def replay(probability: Floats, tokens: ArrayLike, u: ArrayLike) -> Replay:
    """Measure claimed tokens against their draws. `probability` has one row per token."""
    ids = np.asarray(tokens, dtype=np.int64)
    targets = np.asarray(u, dtype=np.float64)
    rows = np.arange(ids.size)
    total = probability.sum(axis=-1)
    cumulative = np.cumsum(probability, axis=-1) / total[:, None]
    squares = np.cumsum(np.square(probability / total[:, None]), axis=-1)
    high = cumulative[rows, ids]
    low = np.where(ids > 0, cumulative[rows, np.maximum(ids - 1, 0)], 0.0)
    squares_low = np.where(ids > 0, squares[rows, np.maximum(ids - 1, 0)], 0.0)
    return distances(targets, low, high, squares_low, squares[rows, ids], squares[:, -1])


def distances(
    u: Floats, low: Floats, high: Floats, squares_low: Floats, squares_high: Floats, squares: Floats
) -> Replay:
    """Return D and z from intervals [low, high) and sums of p².

    The sums are those below the interval's edges, and in all.
    """
    below = np.maximum(low - u, 0.0)
    above = np.maximum(u - high, 0.0)
    d = np.maximum(below, above)
    edge = np.where(below > 0, low, high)
    s2 = np.where(below > 0, squares_low, squares_high)
    spread = (1 - edge) ** 2 * s2 + edge**2 * (squares - s2) + 0.25 * (edge * (1 - edge)) ** 2
    scaled = np.divide(d, np.sqrt(spread), out=np.full_like(d, FARTHEST), where=spread > 0)
    return Replay(d, np.where(d > 0, np.minimum(scaled, FARTHEST), 0.0))
