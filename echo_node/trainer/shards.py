"""How the weights and the work of a step lie over processes. Here: whole, in this one.

What is sharded says the same through the same few functions, so the step is written once. It knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Whole:
    """One process has every weight and does all the work."""

    def spread(self, policy: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Leave in this process its part of each weight."""

    def part(self, weight: Tensor) -> Tensor:
        """This process's part of a weight or of its gradient, as a plain tensor on the same memory."""
        return weight.detach()

    def cut(self, weight: Tensor, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that is shaped as the weight is."""
        return whole.reshape(weight.shape)

    def whole(self, weight: Tensor, part: Tensor) -> Tensor:
        """The whole of a tensor from every process's part of it, cut as the weight is. All must call it."""
        return part.reshape(weight.shape)

    def share(self, work: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """What of the work is this process's, and whether it counts: all go through as many pieces."""
        return ((piece, True) for piece in work)

    def sum(self, amounts: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        return list(amounts)

    def norm(self, parts: Sequence[Tensor]) -> Tensor:
        """The length of the vector that all parts on all processes make up."""
        return nn.utils.get_total_norm(parts) if parts else torch.tensor(0.0)
