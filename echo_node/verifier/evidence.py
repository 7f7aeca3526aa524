"""Seed-replay distances and log-probability gaps of a claimed completion.

Kept as sums over tokens, so that the evidence of completions, groups and peers adds up. Gaps of end
tokens and of rare tokens are summed apart: they are few, so that lies on them alone hardly move the
mean of all, and they steer what is learnt the most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Floats, Scores

RARE: Final = float(np.log(0.1))
"""Log-probability below which a token is rare, by the verifier's own model."""


@dataclass(frozen=True, slots=True)
class GapSum:
    """Log-probability gaps of tokens: claimed − computed, signed and absolute."""

    tokens: int = 0
    signed: float = 0.0
    absolute: float = 0.0

    def __add__(self, other: GapSum) -> GapSum:
        return GapSum(self.tokens + other.tokens, self.signed + other.signed, self.absolute + other.absolute)

    @classmethod
    def of(cls, gaps: Floats) -> GapSum:
        return cls(gaps.size, float(gaps.sum()), float(np.abs(gaps).sum()))


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over tokens: replay distances `d`, `z`, gaps, temperature contrasts.

    Gaps are those of log-probabilities.
    """

    tokens: int = 0
    d_sum: float = 0.0
    d_most: float = 0.0
    z_sum: float = 0.0
    z_most: float = 0.0
    gap_sum: float = 0.0
    contrast_sum: float = 0.0
    gap_most: float = 0.0
    ends: GapSum = field(default_factory=GapSum)
    """Gaps of end tokens."""
    rare: GapSum = field(default_factory=GapSum)
    """Gaps of tokens that the verifier's model gives a log-probability below `RARE`."""

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.tokens + other.tokens,
            self.d_sum + other.d_sum,
            max(self.d_most, other.d_most),
            self.z_sum + other.z_sum,
            max(self.z_most, other.z_most),
            self.gap_sum + other.gap_sum,
            self.contrast_sum + other.contrast_sum,
            max(self.gap_most, other.gap_most),
            self.ends + other.ends,
            self.rare + other.rare,
        )

    @property
    def d_mean(self) -> float:
        return self.d_sum / self.tokens if self.tokens else 0.0

    @property
    def z_mean(self) -> float:
        return self.z_sum / self.tokens if self.tokens else 0.0

    @property
    def gap_mean(self) -> float:
        return self.gap_sum / self.tokens if self.tokens else 0.0

    @property
    def contrast(self) -> float:
        return self.contrast_sum / self.tokens if self.tokens else 0.0


def evidence(
    scores: Scores,
    luck: Floats,
    claimed: Floats,
    is_end: NDArray[np.bool_],
    others: tuple[Scores, ...] = (),
) -> Evidence:
    """Compare prefill scores with the slot's uniforms and claimed logprobs.

    The uniforms are `luck`. `is_end` says which of the tokens are end tokens. `others` are scores
    of the same tokens at a lower and a higher temperature: a sampler that used one of those has a
    smaller distance there.
    """
    replay = scores.replay(luck)
    gaps = claimed - scores.logprobs
    sizes = np.abs(gaps)
    nearest = min((float(other.replay(luck).d.sum()) for other in others), default=0.0)
    return Evidence(
        tokens=luck.size,
        d_sum=float(replay.d.sum()),
        d_most=float(replay.d.max(initial=0.0)),
        z_sum=float(replay.z.sum()),
        z_most=float(replay.z.max(initial=0.0)),
        gap_sum=float(sizes.sum()),
        contrast_sum=float(replay.d.sum()) - nearest if others else 0.0,
        gap_most=float(sizes.max(initial=0.0)),
        ends=GapSum.of(gaps[is_end]),
        rare=GapSum.of(gaps[scores.logprobs < RARE]),
    )
