"""Linear layers with a LoRA adapter, for the torch engine and the trainer.

A and B stay apart from the base: merging would round to the base's type and rewrite the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from echo_node.errors import ConfigError
from echo_node.models.adapter import AdapterSettings, adapter_tensors, read_adapter


class LoraLinear(nn.Module):
    """A frozen linear layer plus scale · B (A x)."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        where = base.weight.device
        self.base = base
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features, dtype=dtype, device=where))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=where))
        self.scale = scale
        self.on = True

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.base(rows)
        if not self.on:
            return found
        low = nn.functional.linear(rows, self.lora_A)
        return torch.add(found, nn.functional.linear(low, self.lora_B), alpha=self.scale)


class LoraLayers:
    """All adapted layers of a model, and their tensors by PEFT's names."""

    def __init__(self, model: nn.Module, settings: AdapterSettings, dtype: torch.dtype) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        model.requires_grad_(requires_grad=False)
        self.layers: dict[str, LoraLinear] = {}
        self.weights: dict[str, nn.Parameter] = {}
        for tensor in adapter_tensors(shapes, settings):
            layer = self.layers.get(tensor.module)
            if layer is None:
                layer = _adapt(model, tensor.module, settings, dtype)
                self.layers[tensor.module] = layer
            self.weights[tensor.name] = layer.lora_A if tensor.side == "A" else layer.lora_B

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base alone in this block."""
        for layer in self.layers.values():
            layer.on = False
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.on = True


def adapt_model(model: nn.Module, folder: Path, dtype: torch.dtype) -> LoraLayers | None:
    """Put a folder's adapter into a model, without values; None if it has none."""
    settings = read_adapter(folder)
    return None if settings is None else LoraLayers(model, settings, dtype)


def _adapt(model: nn.Module, module: str, settings: AdapterSettings, dtype: torch.dtype) -> LoraLinear:
    owner, _, name = module.rpartition(".")
    parent = model.get_submodule(owner)
    base = getattr(parent, name)
    if type(base) is not nn.Linear:
        raise ConfigError(
            f"{module} is a {type(base).__name__}, and adapters are for linear layers",
            advice="leave it out of lora.targets",
        )
    layer = LoraLinear(base, settings.rank, settings.scale, dtype)
    setattr(parent, name, layer)
    return layer
