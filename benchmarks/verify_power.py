"""Tokens to detect a forger at 99 % power and one false alarm in a thousand.

Thresholds come from honest tokens of some prompts, and are held against those of others. Means are
taken of whole runs of neighbouring tokens, since neighbours are alike. Pure numbers: it knows no
engine, no group and no peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Scores
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.tolerance import Tolerance

Floats = NDArray[np.float64]
FALSE_ALARMS: Final = 0.001
DETECTION: Final = 0.99
FEWEST: Final = 8
POOLS: Final = 32
"""Least ratio of honest tokens to those of a sample, for a stable threshold."""
NOT_DETECTABLE: Final = "not detectable"
_RUN: Final = 8  # neighbouring tokens that are taken together
_THRESHOLDS: Final = 20_000  # samples, of which one in 3000 lies beyond a threshold
_SAMPLES: Final = 4_000
_AT_ONCE: Final = 500


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per token: distance from its draw, plain and scaled, and log-probability gap."""

    rows: Floats

    @classmethod
    def of(cls, scores: Scores, luck: Floats, claimed: Floats) -> Tokens:
        replay = scores.replay(luck)
        return cls(np.stack((replay.d, replay.z, np.abs(scores.logprobs - claimed))))

    @classmethod
    def join(cls, parts: Iterable[Tokens]) -> Tokens:
        return cls(np.concatenate([part.rows for part in parts], axis=1))

    @property
    def count(self) -> int:
        return int(self.rows.shape[1])

    @property
    def evidence(self) -> Evidence:
        """Return the evidence as the verifier accumulates it."""
        (d, z, gap), most = self.rows.sum(axis=1), self.rows.max(axis=1, initial=0.0)
        return Evidence(self.count, d, most[0], z, most[1], gap)


class Power:
    """Statistical power of the check against honest tokens of one engine class."""

    def __init__(self, calibration: Tokens, bands: Tolerance) -> None:
        self._calibration, self._bands = calibration, bands
        self.thresholds = cache(self._thresholds)

    def needed(self, forged: Tokens) -> int | str:
        """Return the fewest tokens, a power of two, that nearly always exceed a threshold."""
        for count in _counts(min(self.most, forged.count)):
            if self._beyond(forged, count) >= DETECTION:
                return count
        return NOT_DETECTABLE

    @property
    def most(self) -> int:
        """The longest samples that can be distinguished with so many honest tokens."""
        return self._calibration.count // POOLS

    def false_alarms(self, honest: Tokens) -> float:
        """Return the worst false-alarm rate on honest samples of other prompts."""
        return max(self._beyond(honest, count) for count in _counts(min(self.most, honest.count)))

    def condemned(self, forged: Tokens) -> int | str:
        """Return the fewest tokens that nearly always leave the manifest's bands."""
        runs = _runs(forged.rows)
        most = np.max(_windows(forged.rows), axis=2)
        for count in _counts(forged.count):
            found = 0
            for places in _places(runs.shape[1], count, _AT_ONCE):
                for place in places:
                    d, z, gap = runs[:, place].sum(axis=1)
                    d_most, z_most, _ = most[:, place].max(axis=1)
                    found += self._bands.breach(Evidence(count, d, d_most, z, z_most, gap)) is not None
            if found >= DETECTION * _AT_ONCE:
                return count
        return NOT_DETECTABLE

    def _beyond(self, tokens: Tokens, count: int) -> float:
        means = _means(tokens, count, _SAMPLES)
        return float((means > self.thresholds(count)[:, None]).any(axis=0).mean())

    def _thresholds(self, count: int) -> Floats:
        """Per mean. A third of the false alarms for each, so that all together give no more."""
        means = _means(self._calibration, count, _THRESHOLDS)
        found: Floats = np.quantile(means, 1 - FALSE_ALARMS / len(means), axis=1)
        return found


def _counts(most: int) -> Iterator[int]:
    """Return sample sizes in powers of two, up to the tokens there are."""
    count = FEWEST
    while count <= max(FEWEST, most):
        yield count
        count *= 2


def _windows(rows: Floats) -> Floats:
    """Every run of neighbours, the first ones following the last."""
    short = np.tile(rows, -(-_RUN // rows.shape[1])) if rows.shape[1] < _RUN else rows
    found: Floats = np.lib.stride_tricks.sliding_window_view(
        np.concatenate((short, short[:, : _RUN - 1]), axis=1), _RUN, axis=1
    )
    return found


def _runs(rows: Floats) -> Floats:
    found: Floats = _windows(rows).sum(axis=2)
    return found


def _places(runs: int, count: int, samples: int) -> Iterator[NDArray[np.int64]]:
    luck = np.random.default_rng(count)
    for _ in range(0, samples, _AT_ONCE):
        yield luck.integers(0, runs, (min(samples, _AT_ONCE), count // _RUN))


def _means(tokens: Tokens, count: int, samples: int) -> Floats:
    runs = _runs(tokens.rows)
    parts = [runs[:, places].sum(axis=2) / count for places in _places(runs.shape[1], count, samples)]
    return np.concatenate(parts, axis=1)
