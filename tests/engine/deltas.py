"""Synthetic training steps: a few elements of a few tensors change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echo_node.engine.base import Change, TensorBytes


class Training:
    """Weights that change. Every tensor has its turn, norms, biases and the embedding too."""

    def __init__(self, weights: dict[str, TensorBytes], seed: int = 0) -> None:
        self._draws = np.random.default_rng(seed)
        self._like = weights
        self._bits = {
            name: np.frombuffer(tensor.data, "<u4" if tensor.dtype == "f32" else "<u2").copy()
            for name, tensor in weights.items()
        }
        self._turn = 0

    def weights(self) -> dict[str, TensorBytes]:
        return {
            name: TensorBytes(like.dtype, like.shape, self._bits[name].tobytes())
            for name, like in self._like.items()
        }

    def step(self, granule: int) -> Iterator[Change]:
        """Move most elements by one unit in the last place; some change sign or become zero."""
        names = list(self._bits)
        for _ in range(4):
            name = names[self._turn % len(names)]
            self._turn += 1
            bits = self._bits[name]
            moved = self._draws.choice(bits.size, min(bits.size, 7), replace=False)
            bits[moved] ^= np.array(1, bits.dtype)
            bits[moved[0]] ^= np.array(1 << (8 * bits.itemsize - 1), bits.dtype)
            bits[moved[-1]] = 0
            runs = np.unique(moved // granule)
            whole = (runs[:, None] * granule + np.arange(granule)).ravel()
            positions = whole[whole < bits.size]
            yield Change(name, positions, bits[positions])
