"""FSDP2 sharding of the weights and the work of a step; all processes call alike.

Each process has an equal piece of every weight, master and moment, and its share of the
micro-batches; gradients are summed, as one process would have summed them. torch.distributed does
the communication: no collective is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from echo_node.errors import DefectError
from echo_node.trainer.sharding import Unsharded

T = TypeVar("T")


class FsdpSharded(Unsharded):
    """The shard of this process, in an open process group.

    Weights stay float32: FSDP adds gradients up in the type of the sharded weight.
    """

    only_f32: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._mesh = init_device_mesh(device.type, (self._size,))

    def spread(self, policy: nn.Module, blocks: Sequence[nn.Module]) -> None:
        for module in (*blocks, policy):
            fully_shard(module, mesh=self._mesh)
            if not isinstance(module, FSDPModule):
                raise DefectError("a module was sharded and is no sharded one")
            # The sum of all totals is divided once, by the whole weight.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)  # all that gloo supports

    def part(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            return _sharded(weight).to_local()

    def cut(self, weight: Tensor, whole: Tensor) -> Tensor:
        pieces = whole.reshape(weight.shape).chunk(self._size)
        return pieces[self._rank] if self._rank < len(pieces) else whole[:0]

    def whole(self, weight: Tensor, part: Tensor) -> Tensor:
        """Return the whole tensor on rank 0, and an empty one elsewhere, to save memory."""
        sharded = _sharded(weight)
        full: Tensor = DTensor.from_local(
            part,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        ).full_tensor()
        return full if self._rank == 0 else full.new_empty(0)

    def share(self, work: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """Deal the work out in turn, so that long pieces, which are adjacent, are spread.

        A process that has none left repeats the first, without counting it: all must run as many.
        """
        for start in range(0, len(work), self._size):
            mine = start + self._rank
            yield (work[mine], True) if mine < len(work) else (work[0], False)

    def sum(self, amounts: Sequence[float]) -> list[float]:
        added = torch.tensor(amounts, dtype=torch.float64, device=self._device)
        dist.all_reduce(added)
        return [float(amount) for amount in added.tolist()]

    def norm(self, parts: Sequence[Tensor]) -> Tensor:
        squares = sum((float(part.double().square().sum()) for part in parts), 0.0)
        return torch.tensor(self.sum([squares])[0] ** 0.5, dtype=torch.float32, device=self._device)


def _sharded(weight: Tensor) -> DTensor:
    if not isinstance(weight, DTensor):
        raise DefectError("a weight is whole where it should be sharded")
    return weight
