"""oneDNN-packed linear layers, for faster decoding on a CPU.

The few rows of a decoding step go through a packed matrix up to twice as fast. A packed matrix is a
copy, made again after its weight has changed, which costs as much as many steps save. So matrices
are packed once they have served `PAYS` steps: a run that publishes after every few tokens never
packs, and one that does pays at most twice what it would have with foresight. Scoring uses the
usual path. The path follows from the calls alone, so that the same calls give the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from echo_node.engine.host_resources import available_memory

LEAST: Final = 2**17
"""Elements of a matrix that gains by it."""
ROWS: Final = 16
"""Rows for which weights are packed; other numbers work too."""
PAYS: Final = 32
"""Decoding steps under the same weights that cost, unpacked, as much more as packing them would:
SmolLM2-135M takes 0.4 s to pack, and 12 ms less a step."""
PART: Final = 1 / 8
"""Share of the free memory for packed copies; keys and values need the rest."""


class OneDnnLinears:
    """Linear layers that gain by oneDNN packing.

    There are none without support or memory for the copies.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if type(module) is nn.Linear and _gains(module.weight)]
        wanted = sum(layer.weight.nbytes for layer in layers)
        free = available_memory()
        fits = free is None or wanted <= PART * free
        self._packed: dict[nn.Linear, Tensor | None] = dict.fromkeys(layers if fits else ())
        self._on = False
        self._steps = 0
        """Decoding steps since a weight changed."""
        for layer in self._packed:
            layer.forward = partial(self._through, layer)  # type: ignore[method-assign] # torch's own way to change one

    @property
    def nbytes(self) -> int:
        """Bytes of all packed copies."""
        return sum(layer.weight.nbytes for layer in self._packed)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run one decoding step on packed matrices, if they have served long enough."""
        self._steps += 1
        self._on = self._steps > PAYS
        try:
            yield
        finally:
            self._on = False

    def changed(self, weight: Tensor | None = None) -> None:
        """Mark this weight, or all of them, as changed."""
        self._steps = 0
        for layer in self._packed:
            if weight is None or layer.weight is weight:
                self._packed[layer] = None

    def close(self) -> None:
        """Let go of layers and copies."""
        for layer in self._packed:
            del layer.forward
        self._packed.clear()

    def _through(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        if not self._on:
            return nn.functional.linear(rows, layer.weight, layer.bias)
        packed = self._packed[layer]
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), ROWS)  # noqa: SLF001 - torch is pinned
            self._packed[layer] = packed
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, layer.bias, "none", [], "")  # noqa: SLF001
        return found


def _gains(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= LEAST
        and platform.machine() in {"x86_64", "AMD64"}
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )
