"""Weights other than the named head's: stale, perturbed, or another model's.

Knows tensors of the chain's type, bf16, and nothing of runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from echo_node.engine.base import TensorBytes

Weights = Mapping[str, TensorBytes]


def nudged(weights: Weights, share: float, *, steps: int = 1, seed: int = 0) -> dict[str, TensorBytes]:
    """Return weights of which a share moved by one ulp at each step, as in training."""
    luck = np.random.default_rng(seed)
    moved = {}
    for name, tensor in weights.items():
        bits = np.frombuffer(tensor.data, "<u2").copy()
        for _ in range(steps):
            places = luck.integers(0, bits.size, luck.binomial(bits.size, share))
            places = places[bits[places] & 0x7FFF > 0]  # nothing lies below zero
            bits[places] += luck.choice(np.array([1, 0xFFFF], np.uint16), places.size)
        moved[name] = dataclasses.replace(tensor, data=bits.tobytes())
    return moved


def scaled(weights: Weights, amount: float, seed: int = 0) -> dict[str, TensorBytes]:
    """Return weights with a relative error finer than bf16 can express."""
    luck = np.random.default_rng(seed)
    other = {}
    for name, tensor in weights.items():
        values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        factors = 1 + np.float32(amount) * luck.standard_normal(values.size, np.float32)
        other[name] = TensorBytes("f16", tensor.shape, (values * factors).astype("<f2").tobytes())
    return other


def noised(weights: Weights, amount: float, seed: int = 0) -> dict[str, TensorBytes]:
    """Weights of another model: every one is off by a part of the tensor's spread."""
    luck = np.random.default_rng(seed)
    other = {}
    for name, tensor in weights.items():
        values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        noise = np.float32(amount * float(values.std() or 1.0)) * luck.standard_normal(
            values.size, np.float32
        )
        bits = ((values + noise).view(np.uint32) >> 16).astype(np.uint16)
        other[name] = dataclasses.replace(tensor, data=bits.tobytes())
    return other
