"""From logits to tokens and back: the draws and the measures of `protocol.sampling`, for many rows at once.

The same numbers as there, bit for bit, in blocks that fit in the cache however large the vocabulary is. Pure
numpy: all engines share it. It knows nothing of models, prompts or keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Floats, Ids, Scores
from echo_node.errors import EngineError
from protocol.sampling import probabilities

Logits = NDArray[np.floating[Any]]

_BLOCK: Final = 2**18  # probabilities that are worked on at once: 2 MB of float64
_COUNTED: Final = 256  # up to this vocabulary, counting along a row is faster than a search in it


def draw(logits: Logits, rows: Ids, u: Floats, temperature: float) -> tuple[Ids, Floats]:
    """The token of each `u`, from the distribution of its row of `logits`, and the token's log-probability."""
    tokens, logprobs = np.empty(rows.shape, np.int64), np.empty(rows.shape)
    for block in _blocks(logits):
        here = np.flatnonzero((rows >= block.start) & (rows < block.stop))
        if here.size:
            place = rows[here] - block.start
            probability = _probabilities(logits[block], temperature)
            cumulative = np.cumsum(probability, axis=-1)
            tokens[here] = _search(cumulative, place, u[here] * cumulative[place, -1])
            logprobs[here] = _log(logits[block], probability, place, tokens[here], temperature)
    return tokens, logprobs


def measure(logits: Logits, ids: Ids, temperature: float) -> Scores:
    """Where each of `ids` stands in the distribution of its own row of `logits`."""
    columns = np.empty((6, ids.size))
    for block in _blocks(logits):
        tokens = ids[block]
        place = np.arange(tokens.size)
        probability = _probabilities(logits[block], temperature)
        total = probability.sum(axis=-1, keepdims=True)
        cumulative = np.cumsum(probability, axis=-1) / total
        squares = np.cumsum(np.square(probability / total), axis=-1)
        below = np.maximum(tokens - 1, 0)
        columns[:, block] = (
            _log(logits[block], probability, place, tokens, temperature),
            np.where(tokens > 0, cumulative[place, below], 0.0),
            cumulative[place, tokens],
            np.where(tokens > 0, squares[place, below], 0.0),
            squares[place, tokens],
            squares[:, -1],
        )
    return Scores(*columns)


def _blocks(logits: Logits) -> Iterator[slice]:
    count, width = logits.shape
    step = max(1, _BLOCK // width)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _probabilities(logits: Logits, temperature: float) -> Floats:
    if not np.isfinite(logits.max(axis=-1)).all():
        raise EngineError(
            "the model's logits are not finite",
            advice="the weights of this head are broken: wait for another",
        )
    return probabilities(logits, temperature)


def _search(cumulative: Floats, place: Ids, targets: Floats) -> Ids:
    """Per target, the smallest id whose cumulative probability in its row exceeds it."""
    if cumulative.shape[-1] <= _COUNTED:
        counted: Ids = np.count_nonzero(cumulative[place] <= targets[:, None], axis=-1)
        return counted
    found = [np.searchsorted(cumulative[row], x, side="right") for row, x in zip(place, targets, strict=True)]
    return np.array(found, dtype=np.int64)


def _log(logits: Logits, probability: Floats, place: Ids, tokens: Ids, temperature: float) -> Floats:
    """Log-probabilities by way of the likeliest token, which stay finite where the probability is zero."""
    likeliest = probability.argmax(axis=-1)[place]
    gap = logits[place, tokens].astype(np.float64) - logits[place, likeliest].astype(np.float64)
    logprobs: Floats = gap / temperature + np.log(probability[place, likeliest])
    return logprobs
