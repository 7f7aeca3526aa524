"""Column-major fp32 weights of linear layers, for CPU decoding.

A product of 16 rows with two threads takes about half the time that it takes with a row-major
matrix. Names, shapes and values stay the same, and no memory is added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echo_node.errors import EngineError


def lay_by_columns(model: nn.Module) -> None:
    """Make fp32 linear layers column-major.

    Other types gain nothing, and float16 would be ten times slower.
    """
    for module in model.modules():
        if type(module) is nn.Linear and _gains(module.weight):
            module.weight.data = module.weight.data.t().contiguous().t()  # the same object: ties hold


def put_at(weight: Tensor, positions: Tensor, values: Tensor) -> None:
    """Set elements by their places in the order of rows, however they lie."""
    if weight.is_contiguous():
        weight.view(-1)[positions] = values
    elif weight.dim() == 2 and weight.t().is_contiguous():
        rows, columns = weight.shape
        place = torch.remainder(positions, columns).mul_(rows).add_(positions // columns)
        weight.t().view(-1)[place] = values
    else:
        raise EngineError("weights that do not lie in one piece")


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
