"""Token sampling and scoring from logits, for many rows at once.

Gives the numbers of `protocol.sampling`, bit for bit, in blocks that fit in the cache whatever the
vocabulary's size. Pure numpy; all engines share it. Logits on a device draw by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Floats, Ids, Scores
from echo_node.errors import EngineError

Logits = NDArray[np.floating[Any]]


class LogitsOnDevice(Protocol):
    """Logits that are drawn from where they are (`device_draws`)."""

    def first(self, vocabulary: int) -> Self:
        """Return the logits of the first ids."""

    def row(self, number: int) -> Self:
        """Return a copy of one row's logits."""

    def stack(self, rows: Sequence[Any]) -> Self:
        """Return rows, each with the logits of one, together."""

    def draw(self, rows: Ids, u: Floats, temperature: float) -> tuple[Ids, Floats]:
        """Draw as `draw` does."""


Follows = Logits | LogitsOnDevice
"""Logits of the next tokens, in host memory or on a device."""

_BLOCK: Final = 2**15  # probabilities that are worked on at once: 256 kB of float64
_COUNTED: Final = 256  # up to this vocabulary, counting along a row is faster than a search in it


def first_ids(logits: Follows, vocabulary: int) -> Follows:
    """Return the logits of the first ids."""
    return logits[:, :vocabulary] if isinstance(logits, np.ndarray) else logits.first(vocabulary)


def row_of(logits: Follows, number: int) -> Follows:
    """Return a copy of the logits of one row."""
    return logits[number].copy() if isinstance(logits, np.ndarray) else logits.row(number)


def stacked(rows: Sequence[Follows]) -> Follows:
    """Return the logits of several rows together."""
    if isinstance(rows[0], np.ndarray):
        return np.stack([each for each in rows if isinstance(each, np.ndarray)])
    return rows[0].stack(rows)


def draw(logits: Follows, rows: Ids, u: Floats, temperature: float) -> tuple[Ids, Floats]:
    """Draw the token of each `u` from its row; return ids and log-probabilities."""
    if not isinstance(logits, np.ndarray):
        return logits.draw(rows, u, temperature)
    tokens, logprobs = np.empty(rows.shape, np.int64), np.empty(rows.shape)
    work = _Work(logits, temperature)
    order = np.argsort(rows, kind="stable")
    firsts = np.searchsorted(rows[order], [block.start for block in work.blocks] + [len(logits)])
    for block, first, end in zip(work.blocks, firsts, firsts[1:], strict=False):
        if first == end:
            continue
        here = order[first:end]
        place = rows[here] - block.start
        probability = work.probabilities(block)
        cumulative = np.cumsum(probability, axis=-1, out=work.other(block))
        tokens[here] = _search(cumulative, place, u[here] * cumulative[place, -1])
        logprobs[here] = _log(logits[block], probability, place, tokens[here], temperature)
    return tokens, logprobs


def measure(logits: Logits, ids: Ids, temperature: float) -> Scores:
    """Return the log-probability and CDF interval of each id in its row."""
    columns = np.empty((6, ids.size))
    work = _Work(logits, temperature)
    for block in work.blocks:
        tokens = ids[block]
        place = np.arange(tokens.size)
        below = np.maximum(tokens - 1, 0)
        probability = work.probabilities(block)
        total = probability.sum(axis=-1, keepdims=True)
        logprobs = _log(logits[block], probability, place, tokens, temperature)
        sums = np.cumsum(probability, axis=-1, out=work.other(block))
        whole = total[:, 0]
        low, high = np.where(tokens > 0, sums[place, below] / whole, 0.0), sums[place, tokens] / whole
        probability /= total
        np.multiply(probability, probability, out=probability)
        squares = np.cumsum(probability, axis=-1, out=work.other(block))
        below_squares = np.where(tokens > 0, squares[place, below], 0.0)
        columns[:, block] = (logprobs, low, high, below_squares, squares[place, tokens], squares[:, -1])
    return Scores(*columns)


class _Work:
    """Reusable buffer for the probabilities of some rows.

    Allocating fresh memory costs more than the sums.
    """

    def __init__(self, logits: Logits, temperature: float) -> None:
        self._logits = logits
        self._temperature = temperature
        count, width = logits.shape
        step = min(count, max(1, _BLOCK // width)) or 1
        self.blocks = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        self._one, self._two = np.empty((step, width)), np.empty((step, width))

    def other(self, block: slice) -> Floats:
        return self._two[: block.stop - block.start]

    def probabilities(self, block: slice) -> Floats:
        """Return probabilities, bit for bit those of `protocol.sampling.probabilities`."""
        powers = self._one[: block.stop - block.start]
        powers[...] = self._logits[block]
        if self._temperature != 1.0:
            powers /= self._temperature
        highest = powers.max(axis=-1, keepdims=True)
        check_finite(highest)
        np.subtract(powers, highest, out=powers)
        np.exp(powers, out=powers)
        powers /= powers.sum(axis=-1, keepdims=True)
        return powers


def check_finite(highest: Floats) -> None:
    """Refuse logits whose maxima are not finite."""
    if not np.isfinite(highest).all():
        raise EngineError(
            "the model's logits are not finite",
            advice="the weights of this head are broken: wait for another",
        )


def _search(cumulative: Floats, place: Ids, targets: Floats) -> Ids:
    """Per target, the smallest id whose cumulative probability in its row exceeds it."""
    if cumulative.shape[-1] <= _COUNTED:
        counted: Ids = np.count_nonzero(cumulative[place] <= targets[:, None], axis=-1)
        return counted
    found = [np.searchsorted(cumulative[row], x, side="right") for row, x in zip(place, targets, strict=True)]
    return np.array(found, dtype=np.int64)


def _log(logits: Logits, probability: Floats, place: Ids, tokens: Ids, temperature: float) -> Floats:
    """Return log-probabilities by the likeliest token, finite where p is zero."""
    likeliest = probability.argmax(axis=-1)[place]
    gap = logits[place, tokens].astype(np.float64) - logits[place, likeliest].astype(np.float64)
    logprobs: Floats = gap / temperature + np.log(probability[place, likeliest])
    return logprobs
