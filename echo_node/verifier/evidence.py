"""Seed-replay distances and log-probability gaps of a claimed completion.

Kept as sums over tokens, so that the evidence of completions, groups and peers adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo_node.engine.base import Floats, Scores


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over tokens: replay distances `d`, `z`, logprob gaps and temperature contrasts."""

    tokens: int = 0
    d_sum: float = 0.0
    d_most: float = 0.0
    z_sum: float = 0.0
    z_most: float = 0.0
    gap_sum: float = 0.0
    contrast_sum: float = 0.0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.tokens + other.tokens,
            self.d_sum + other.d_sum,
            max(self.d_most, other.d_most),
            self.z_sum + other.z_sum,
            max(self.z_most, other.z_most),
            self.gap_sum + other.gap_sum,
            self.contrast_sum + other.contrast_sum,
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


def evidence(scores: Scores, luck: Floats, claimed: Floats, others: tuple[Scores, ...] = ()) -> Evidence:
    """Compare a prefill's scores with the slot's uniforms (`luck`) and the claimed logprobs.

    `others` are scores of the same tokens at a lower and a higher temperature: a sampler that used
    one of those has a smaller distance there.
    """
    replay = scores.replay(luck)
    gaps = np.abs(scores.logprobs - claimed)
    nearest = min((float(other.replay(luck).d.sum()) for other in others), default=0.0)
    return Evidence(
        tokens=luck.size,
        d_sum=float(replay.d.sum()),
        d_most=float(replay.d.max(initial=0.0)),
        z_sum=float(replay.z.sum()),
        z_most=float(replay.z.max(initial=0.0)),
        gap_sum=float(gaps.sum()),
        contrast_sum=float(replay.d.sum()) - nearest if others else 0.0,
    )
