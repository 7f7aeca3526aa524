"""Write bf16 safetensors tensor by tensor, without holding the model.

Tensors are cast in pieces. Rounds to nearest even, as torch does, so that a float32 or float16 file
of bf16 values gives those values bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.models.safetensors_file import MappedTensor

PIECE: Final = 4 * 1024 * 1024
"""Elements that are cast or checked at once."""
_FLOATS: Final = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_EXPONENT: Final = 0x7F80
"""Exponent bits of a bf16 value; all of them set: infinite or not a number."""


def is_finite(bits: NDArray[np.uint16]) -> bool:
    """Return whether all bf16 values of these bit patterns are finite."""
    return not bool(((bits & _EXPONENT) == _EXPONENT).any())


def to_bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return the bf16 bit patterns of numbers, rounded to nearest even."""
    bits = values.astype("<f4", copy=False).view("<u4")
    special = (bits & 0x7F80_0000) == 0x7F80_0000
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    if special.any():  # rounding would carry into the exponent or the sign
        rounded[special] = (bits[special] >> 16).astype("<u2") | ((bits[special] & 0xFFFF) != 0)
    return rounded


def bf16_pieces(name: str, tensor: MappedTensor) -> Iterator[NDArray[np.uint16]]:
    """Yield a mapped tensor's values as bf16 bit patterns."""
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            f"tensor {name[:64]!r} has the type {tensor.dtype}, which cannot be trained",
            advice="take the model in bfloat16, float16 or float32, not a quantised one",
        )
    values = np.frombuffer(tensor.data, _FLOATS[tensor.dtype])
    for start in range(0, values.size, PIECE):
        piece = values[start : start + PIECE]
        yield piece if tensor.dtype == "BF16" else to_bf16(piece)


def write_bf16_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Callable[[str], Iterable[NDArray[np.uint16]]],
    written: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Write a safetensors file; `pieces` yields the bit patterns of a tensor."""
    names = sorted(shapes)
    header, offset = {}, 0
    for name in names:
        size = 2 * math.prod(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with (
        boundary(StoreError, f"writing {path}", advice="see that the disk has room"),
        path.open("wb") as file,
    ):
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            start = done
            for piece in pieces(name):
                file.write(piece.data)
                done += piece.nbytes
                written(done)
            if done - start != 2 * math.prod(shapes[name]):
                raise ConfigError(f"tensor {name[:64]!r} has another size than its shape {shapes[name]}")
