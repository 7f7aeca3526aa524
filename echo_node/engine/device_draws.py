"""Token sampling on a torch device: only tokens and log-probabilities leave it.

The draw is that of `token_sampling`: per row the smallest id whose cumulative probability exceeds u
times the row's sum. Where the device has float64 all is in it. Elsewhere (MPS) probabilities are
float32, and their cumulative sum has two of them, high and low, so that no error adds up over the
vocabulary: it is exact to about 2⁻⁴⁴ of the row's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from echo_node.engine.base import Floats, Ids
from echo_node.engine.token_sampling import check_finite

_SPLIT: Final = 4097.0
"""2¹² + 1: splits a float32 into halves whose products are exact."""


class DeviceLogits:
    """Logits [rows, vocabulary], or of one row, that stay on their device."""

    def __init__(self, values: Tensor, *, float64: bool | None = None) -> None:
        self._values = values
        self._float64 = values.device.type != "mps" if float64 is None else float64

    def first(self, vocabulary: int) -> DeviceLogits:
        """Return the logits of the first ids."""
        return DeviceLogits(self._values[..., :vocabulary], float64=self._float64)

    def row(self, number: int) -> DeviceLogits:
        """Return a copy of one row's logits."""
        return DeviceLogits(self._values[number].clone(), float64=self._float64)

    def stack(self, rows: Sequence[DeviceLogits]) -> DeviceLogits:
        """Return rows, each with the logits of one, together."""
        return DeviceLogits(torch.stack([each._values for each in rows]), float64=self._float64)  # noqa: SLF001

    def numpy(self) -> Floats:
        """Return a copy of the logits in host memory."""
        found: Floats = self._values.float().cpu().numpy()
        return found

    def draw(self, rows: Ids, u: Floats, temperature: float) -> tuple[Ids, Floats]:
        """Draw the token of each `u` from its row; return ids and log-probabilities."""
        at = torch.from_numpy(np.ascontiguousarray(rows)).to(self._values.device)
        highest = self._values.amax(dim=-1)
        check_finite(highest.double().cpu().numpy() if self._float64 else highest.cpu().numpy())
        find = self._in_float64 if self._float64 else self._in_two_float32
        tokens, totals = find(at, highest, u, temperature)
        drawn = self._values[at, tokens].cpu().double() - highest[at].cpu().double()
        logprobs: Floats = (drawn / temperature).numpy() - np.log(totals)
        ids: Ids = tokens.cpu().numpy()
        return ids, logprobs

    def _in_float64(
        self, at: Tensor, highest: Tensor, u: Floats, temperature: float
    ) -> tuple[Tensor, Floats]:
        powers = self._values.double().div_(temperature)
        powers.sub_(highest.double()[:, None] / temperature).exp_()
        totals = powers.sum(dim=-1)
        cumulative = powers.div_(totals[:, None]).cumsum(dim=-1)[at]
        targets = torch.from_numpy(u).to(at.device) * cumulative[:, -1]
        tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
        return tokens, totals[at].cpu().numpy()

    def _in_two_float32(
        self, at: Tensor, highest: Tensor, u: Floats, temperature: float
    ) -> tuple[Tensor, Floats]:
        powers = ((self._values.float() - highest.float()[:, None]) / temperature).exp_()
        high, low = (each[at] for each in cumulative_sum(powers))
        upper = u.astype(np.float32)
        lower = (u - upper).astype(np.float32)
        parts = (torch.from_numpy(each).to(at.device) for each in (upper, lower))
        target, rest = (each[:, None] for each in _product(high[:, -1], low[:, -1], *parts))
        passed = (high < target) | ((high == target) & (low <= rest))
        tokens = passed.sum(dim=-1).clamp_(max=powers.shape[-1] - 1)
        totals: Floats = high[:, -1].cpu().double().numpy() + low[:, -1].cpu().double().numpy()
        return tokens, totals


def cumulative_sum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return cumulative sums over the last axis as high and low parts.

    They are computed by doubling distances.
    """
    high, low = values.clone(), torch.zeros_like(values)
    shift = 1
    while shift < values.shape[-1]:
        more_high, more_low = high[..., :-shift], low[..., :-shift]
        total, error = _two_sum(high[..., shift:], more_high)
        error = error + (low[..., shift:] + more_low)
        rounded = total + error
        high = torch.cat((high[..., :shift], rounded), dim=-1)
        low = torch.cat((low[..., :shift], error - (rounded - total)), dim=-1)
        shift *= 2
    return high, low


def _two_sum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return a rounded sum and its error, exactly (Knuth)."""
    total = left + right
    virtual = total - left
    return total, (left - (total - virtual)) + (right - virtual)


def _product(high: Tensor, low: Tensor, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Return (high + low) · (upper + lower) as product and remainder (Dekker)."""
    product = high * upper

    def halves(value: Tensor) -> tuple[Tensor, Tensor]:
        scaled = value * _SPLIT
        large = scaled - (scaled - value)
        return large, value - large

    (a, b), (c, d) = halves(high), halves(upper)
    error = ((a * c - product) + a * d + b * c) + b * d
    error = error + (high * lower + low * upper)
    rounded = product + error
    return rounded, error - (rounded - product)
