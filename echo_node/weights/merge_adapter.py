"""Merge a LoRA adapter into its base, tensor by tensor, rounded to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError
from echo_node.models.adapter import PREFIX, AdapterSettings
from echo_node.models.bf16_file import PIECE, to_bf16, write_bf16_file
from echo_node.models.folder import map_folder
from echo_node.weights.tensors import State

_ROWS = 1024
"""Rows of a matrix that are merged at once."""


def write_merged(base: Path, adapter: State, settings: AdapterSettings, to: Path) -> None:
    """Write base + scale · B A as one safetensors file; products are in float32."""
    whole = map_folder(base)
    targets = {
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in adapter if "lora_A" in name
    }
    if missing := sorted({f"{each}.weight" for each in targets} - whole.keys()):
        raise ConfigError(f"the adapter is of another base: {base} has no {missing[0]}")

    def pieces(name: str) -> Iterator[NDArray[np.uint16]]:
        bits = np.frombuffer(whole[name].data, "<u2")
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in adapter:
            yield from (bits[start : start + PIECE] for start in range(0, bits.size, PIECE))
            return
        low = _floats(adapter[f"{module}.lora_A.weight"])
        high = _floats(adapter[f"{module}.lora_B.weight"])
        rows = _numbers(bits).reshape(whole[name].shape)
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            yield to_bf16(rows[part] + np.float32(settings.scale) * (high[part] @ low)).ravel()

    write_bf16_file(to, {name: tensor.shape for name, tensor in whole.items()}, pieces)


def _floats(tensor: TensorBytes) -> NDArray[np.float32]:
    return _numbers(np.frombuffer(tensor.data, "<u2")).reshape(tensor.shape)


def _numbers(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
