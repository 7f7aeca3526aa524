"""Placement of the weights and the work of a step over processes; here: unsharded.

The sharded variant has the same few methods, so that the step is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Unsharded:
    """One process has every weight and does all the work."""

    only_f32: ClassVar[bool] = False
    """Whether weights must stay float32."""
    is_whole: ClassVar[bool] = True
    """Whether this process has every weight whole."""

    def spread(self, policy: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Shard the policy, leaving in this process its part of each weight."""

    def part(self, weight: Tensor) -> Tensor:
        """Return this process's part of a weight or gradient, on the same memory."""
        return weight.detach()

    def cut(self, weight: Tensor, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor with the shape of the weight."""
        return whole.reshape(weight.shape)

    def whole(self, weight: Tensor, part: Tensor) -> Tensor:
        """Return the whole tensor from every process's part of it. All must call it."""
        return part.reshape(weight.shape)

    def share(self, work: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """Yield this process's pieces of the work, and whether each counts.

        All processes run equally many.
        """
        return ((piece, True) for piece in work)

    def sum(self, amounts: Sequence[float]) -> list[float]:
        """Return the sums over all processes."""
        return list(amounts)

    def norm(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the norm of the vector of all parts on all processes."""
        if any(part.dtype == torch.bfloat16 for part in parts):
            norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
            return total
        return nn.utils.get_total_norm(parts) if parts else torch.tensor(0.0)
