"""Read safetensors files as mapped tensors, without copies.

The header is checked whole before a tensor is returned: types, shapes, names, and that the tensors
fill the file without gap or overlap. Nothing is executed, and reading takes no memory of its own.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from echo_node.errors import ConfigError, boundary

HEADER_BYTES: Final = 100 * 1024 * 1024
"""Longest header of a safetensors file in bytes, as in the library."""
WIDTHS: Final = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes of one element by its type, as safetensors names it."""
METADATA: Final = "__metadata__"
_DAMAGED: Final = "it is damaged or was cut short: fetch it again"
_RANK: Final = 8  # dimensions of a tensor, as on the wire


class MappedTensor(NamedTuple):
    """One tensor of a file: type by its safetensors name, shape, and mapped bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def map_tensors(path: Path) -> dict[str, MappedTensor]:
    """Return the tensors of one safetensors file, mapped, in the order of the file."""
    with boundary(ConfigError, f"reading {path}", advice=_DAMAGED):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ConfigError(f"{path} is no safetensors file", advice=_DAMAGED)
            data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        length = int.from_bytes(data[:8], "little")
        if length > min(HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is no safetensors file", advice=_DAMAGED)
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ConfigError(f"the header of {path} is no table", advice=_DAMAGED)
        header.pop(METADATA, None)
        body = data[8 + length :]
        found = {name: _tensor(path, name, entry, body) for name, entry in header.items()}
        _check_cover(path, [entry["data_offsets"] for entry in header.values()], len(body))
    return found


def _tensor(path: Path, name: str, entry: Any, body: memoryview) -> MappedTensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in WIDTHS:
        raise ConfigError(f"tensor {name[:64]!r} of {path.name} has the unknown type {str(dtype)[:32]!r}")
    whole = [*shape, start, end]
    if len(shape) > _RANK or not all(type(each) is int and each >= 0 for each in whole):
        raise ConfigError(f"tensor {name[:64]!r} of {path.name} has a malformed entry", advice=_DAMAGED)
    if end > len(body) or end - start != math.prod(shape) * WIDTHS[dtype]:
        raise ConfigError(f"tensor {name[:64]!r} does not lie where {path.name} says", advice=_DAMAGED)
    return MappedTensor(dtype, tuple(shape), body[start:end])


def _check_cover(path: Path, offsets: list[list[int]], size: int) -> None:
    """Check that the tensors fill the file: no byte twice, none unnamed."""
    at = 0
    for start, end in sorted(offsets):
        if start != at:
            raise ConfigError(f"the tensors of {path} overlap or leave a gap", advice=_DAMAGED)
        at = end
    if at != size:
        raise ConfigError(f"{path} has {size - at:,} bytes that no tensor names", advice=_DAMAGED)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("one name stands twice in its header")
    return found
