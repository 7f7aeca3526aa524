"""LoRA adapters in PEFT's form: settings file, tensor names, shapes, first values.

A model's folder with `lora.json` is a frozen base with an adapter: `model.safetensors` is the base,
`lora.safetensors` the adapter, and what is trained is the adapter alone. The settings are those of
PEFT's `adapter_config.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import ConfigError
from echo_node.models.bf16_file import to_bf16, write_bf16_file
from echo_node.models.folder import map_folder, read_json, read_model_config
from echo_node.models.safetensors_file import MappedTensor, map_tensors

SETTINGS: Final = "lora.json"
WEIGHTS: Final = "lora.safetensors"
"""Files of an adapter in a model's folder; by PEFT's own names `transformers` would load it too."""
PEFT_SETTINGS: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
_NOT_LINEAR: Final = ("embed_tokens", "lm_head", "wte", "wpe")
"""Matrices that are no linear layers, or the output head, which PEFT's `all-linear` leaves out."""
_TRANSPOSED: Final = ("gpt2",)
"""Families whose linear layers lie transposed."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Rank, scaling and target modules of an adapter; `targets` ascends."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor of an adapter: the module that it belongs to, its side, its shape."""

    name: str
    module: str
    side: Literal["A", "B"]
    shape: tuple[int, int]


def read_adapter(folder: Path) -> AdapterSettings | None:
    """Return the settings of a folder's adapter; None if it is a whole model's."""
    path = folder / SETTINGS
    if not path.is_file():
        return None
    found = read_json(path)
    rank, alpha, targets = (found.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if (
        type(rank) is not int
        or rank < 1
        or not isinstance(alpha, int | float)
        or not isinstance(targets, list)
        or not targets
        or not all(isinstance(each, str) for each in targets)
    ):
        raise ConfigError(f"{path} does not describe a LoRA adapter", advice="make the run's folder again")
    return AdapterSettings(rank, float(alpha), tuple(sorted(targets)))


def settings_file(settings: AdapterSettings, base: str = "") -> bytes:
    """Return the settings as PEFT reads them."""
    written: dict[str, Any] = {
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": list(settings.targets),
        "task_type": "CAUSAL_LM",
    }
    return (json.dumps(written, indent=2) + "\n").encode()


def all_linear(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the names of all linear modules but the output head.

    PEFT's `all-linear` does the same.
    """
    found = {module.rpartition(".")[2] for module, _ in _linear(shapes)}
    return tuple(sorted(found))


def adapter_tensors(
    shapes: Mapping[str, tuple[int, ...]], settings: AdapterSettings
) -> tuple[AdapterTensor, ...]:
    """Return an adapter's tensors for a base of these shapes.

    Unknown targets are refused.
    """
    wanted = set(settings.targets)
    found: list[AdapterTensor] = []
    for module, (rows, columns) in _linear(shapes):
        if (last := module.rpartition(".")[2]) not in settings.targets:
            continue
        wanted.discard(last)
        if settings.rank > min(rows, columns):
            raise ConfigError(
                f"an adapter of rank {settings.rank} for {module}, a matrix of {rows} × {columns}",
                advice=f"lora.rank is at most {min(rows, columns)} for this model",
            )
        name = PREFIX + module
        found += [
            AdapterTensor(f"{name}.lora_A.weight", module, "A", (settings.rank, columns)),
            AdapterTensor(f"{name}.lora_B.weight", module, "B", (rows, settings.rank)),
        ]
    if wanted:
        raise ConfigError(
            f"the model has no linear module called {min(wanted)!r}",
            advice=f"lora.targets takes some of {', '.join(all_linear(shapes))}",
        )
    return tuple(sorted(found, key=lambda each: each.name))


def base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's base by name; refuse a family without adapters."""
    family = str(read_model_config(folder).get("model_type", ""))
    if family in _TRANSPOSED:
        raise ConfigError(
            f"adapters for {family} models are not supported: their linear layers lie transposed",
            advice="train the whole model, or take one of another family",
        )
    return {name: tensor.shape for name, tensor in map_folder(folder).items()}


def write_first_adapter(path: Path, tensors: Sequence[AdapterTensor], seed: bytes) -> None:
    """Write the adapter that a run begins with: A as PEFT draws it, B zero."""
    shapes = {each.name: each.shape for each in tensors}
    sides = {each.name: each.side for each in tensors}
    draws = {each.name: np.random.default_rng([*seed, place]) for place, each in enumerate(tensors)}

    def pieces(name: str) -> Iterator[NDArray[np.uint16]]:
        shape = shapes[name]
        if sides[name] == "B":
            yield np.zeros(shape, np.uint16)
        else:
            reach = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = √5
            yield to_bf16(draws[name].uniform(-reach, reach, shape).astype(np.float32))

    write_bf16_file(path, shapes, pieces)


def map_weights(folder: Path) -> dict[str, MappedTensor]:
    """Return what is trained of a folder, mapped: its adapter, or the whole model."""
    if read_adapter(folder) is None:
        return map_folder(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}", advice="make the run's folder again")
    return dict(sorted(map_tensors(path).items()))


def _linear(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, shape in sorted(shapes.items()):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] not in _NOT_LINEAR:
            yield module, (shape[0], shape[1])
