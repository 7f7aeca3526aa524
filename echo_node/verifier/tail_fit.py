"""Bounds of an engine class, extrapolated beyond the measured tokens.

A minute shows some ten thousand honest tokens, and a run checks millions, on other machines too.
So the tail of each figure, a generalised Pareto distribution above a high threshold, is followed to
a rate at which honest tokens are refused hardly ever; means are resampled completion by completion
from the measured tokens and that tail. No bound is below the class's floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.verifier.calibration import FARTHEST, LARGEST_GAP, MARGIN, TOKEN_MARGIN, WIDE_SHARE, round_up
from echo_node.verifier.evidence import Evidence, GapSum
from echo_node.verifier.tolerance import GAP, Tolerance, few_gap_share
from protocol.manifest import EngineTolerance

TOKEN_RATE: Final = 1e-7
"""Share of honest tokens that a bound on single tokens may refuse: one of ten million."""
LENGTHS: Final = (16, 64, 128, 320, 512, 2048, 8192)
"""Tokens of the means that are resampled: pieces, completions, groups and a peer's sums."""
MEAN_MARGIN: Final = 1.5
"""Multiple of the means of independent tokens: those of one text have much in common.

A mean of 320 honest tokens of SmolLM2 in `llama/f16` was 1.5 times what independent ones give.
"""
SHAPES: Final = (0.15, 0.3)
"""Least and largest shape of a tail.

Of SmolLM2 in `llama/f16`, 6,000 tokens show shapes from 0 to 0.3. A tail of shape 0 ends where
42,000 tokens have shown another one, at twice its bound.
"""
FEWEST_TAIL: Final = 12
"""Fewest positive values that a tail is fitted to; of fewer, a multiple of the largest is taken."""
FEW_MARGIN: Final = 3.0
"""That multiple."""
_TAIL_SHARE: Final = 0.06
"""Share of the positive values that make up the tail."""
_LARGEST_TAIL: Final = 256
_SHAPE_PRIOR: Final = 100
"""Tail values that the least shape counts as, beside the measured ones."""
_DRAWS: Final = 20_000
"""Means resampled per length; the largest of them but one counts."""
_RATE_PRIOR: Final = 64
"""Tokens of the common rate that are added to a completion's own, so that few say little."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenFigures:
    """Figures of one honest completion, token by token."""

    d: Values
    z: Values
    gaps: Values
    """Log-probabilities: claimed − computed."""
    is_end: NDArray[np.bool_]
    is_rare: NDArray[np.bool_]

    def evidence(self) -> Evidence:
        """Sum the figures up, as a verifier does."""
        sizes = np.abs(self.gaps)
        return Evidence(
            tokens=self.d.size,
            d_sum=float(self.d.sum()),
            d_most=float(self.d.max(initial=0.0)),
            z_sum=float(self.z.sum()),
            z_most=float(self.z.max(initial=0.0)),
            gap_sum=float(sizes.sum()),
            gap_most=float(sizes.max(initial=0.0)),
            ends=GapSum.of(self.gaps[self.is_end]),
            rare=GapSum.of(self.gaps[self.is_rare]),
        )


def fit_tolerance(floor: EngineTolerance, found: Sequence[TokenFigures]) -> EngineTolerance:
    """Return a class's bounds from honest completions, at least its floor."""
    d, z = [each.d for each in found], [each.z for each in found]
    seen = [each.evidence() for each in found]
    seen.append(sum(seen, Evidence()))
    d_most = max(floor.d_most, tail_bound(np.concatenate(d), TOKEN_RATE))
    z_most = max(floor.z_most, tail_bound(np.concatenate(z), TOKEN_RATE))
    gaps = np.abs(np.concatenate([each.gaps for each in found]))
    gap_mean = max(each.gap_mean / Tolerance.scale(max(1, each.tokens)) for each in seen)
    few_gaps = max(few_gap_share(few) for each in seen for few in (each.ends, each.rare))
    gap_most = min(tail_bound(gaps, TOKEN_RATE), TOKEN_MARGIN * float(gaps.max(initial=0.0)))
    tolerance = replace(
        floor,
        d_mean=_up(max(floor.d_mean, mean_bound(d, d_most), MARGIN * gap_mean / GAP), 1.0),
        d_most=_up(d_most, 1.0),
        gap_most=_up(max(floor.gap_most, gap_most, MARGIN * few_gaps), LARGEST_GAP),
        z_mean=_up(max(floor.z_mean, mean_bound(z, z_most)), FARTHEST),
        z_most=_up(z_most, FARTHEST),
    )
    return replace(tolerance, share=WIDE_SHARE) if Tolerance(tolerance).wide else tolerance


@dataclass(frozen=True, slots=True)
class Tail:
    """A generalised Pareto tail: `size` of the values lie above `threshold`."""

    threshold: float
    scale: float
    shape: float
    size: int

    @classmethod
    def of(cls, descending: Values) -> Tail:
        """Fit the tail of positive values; its scale is taken two standard errors larger."""
        size = min(descending.size - 1, _LARGEST_TAIL, max(FEWEST_TAIL, int(_TAIL_SHARE * descending.size)))
        excess = descending[:size] - descending[size]
        mean, spread = float(excess.mean()), float(excess.var())
        by_moments = 0.5 * (1.0 - mean * mean / spread) if spread > 0 else 0.0
        least, largest = SHAPES
        shape = (size * by_moments + _SHAPE_PRIOR * least) / (size + _SHAPE_PRIOR)
        shape = min(largest, max(least, shape))
        scale = mean * (1.0 - shape) * (1.0 + 2.0 / math.sqrt(size))
        return cls(float(descending[size]), scale, shape, size)

    def exceeded_by(self, share: float) -> float:
        """Return the value that this share of the tail's own values exceeds."""
        far = math.pow(max(1.0, 1.0 / share), self.shape)
        return self.threshold + self.scale * (far - 1.0) / self.shape


def tail_bound(values: Values, rate: float) -> float:
    """Return the value that a share `rate` exceeds, at least the largest value."""
    positive = np.sort(values[values > 0])[::-1]
    if positive.size <= FEWEST_TAIL:
        return FEW_MARGIN * float(positive[0]) if positive.size else 0.0
    tail = Tail.of(positive)
    return max(tail.exceeded_by(rate * values.size / tail.size), float(positive[0]))


def mean_bound(completions: Sequence[Values], most: float) -> float:
    """Return the 64-token mean bound that honest means of `LENGTHS` keep to.

    Each mean is resampled at the rate of one measured completion, since texts differ; a mean that
    one token within `most` explains needs no bound.
    """
    pooled = np.concatenate(completions)
    positive = np.sort(pooled[pooled > 0])[::-1]
    if positive.size <= FEWEST_TAIL:
        return FEW_MARGIN * max(float(each.mean()) / Tolerance.scale(each.size) for each in completions)
    draws = np.random.default_rng(0)
    common = positive.size / pooled.size
    rates = np.array(
        [
            ((each > 0).sum() + _RATE_PRIOR * common) / (each.size + _RATE_PRIOR)
            for each in completions
            if each.size
        ]
    )
    needed = 0.0
    for length in LENGTHS:
        counts = draws.binomial(length, draws.choice(rates, _DRAWS))
        values = _resample(positive, int(counts.sum()), draws)
        owners = np.repeat(np.arange(_DRAWS), counts)
        means = np.bincount(owners, weights=values, minlength=_DRAWS) / length
        bound = float(np.quantile(means, 1.0 - 1.0 / _DRAWS))
        if bound > most / length:
            needed = max(needed, bound / Tolerance.scale(length))
    return MEAN_MARGIN * needed


def _resample(positive: Values, count: int, draws: np.random.Generator) -> Values:
    """Draw from descending values, with the tail from its fitted distribution."""
    places = draws.integers(0, positive.size, count)
    values = positive[places]
    tail = Tail.of(positive)
    inside = places < tail.size
    shares = 1.0 - draws.random(int(inside.sum()))
    values[inside] = tail.threshold + tail.scale * (shares**-tail.shape - 1.0) / tail.shape
    return values


def _up(value: float, most: float) -> float:
    return round_up(min(most, value))
