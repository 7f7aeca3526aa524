"""GGUF file of a model's weights, rewritable in place, whole or by element.

The file holds no tokenizer. `put` writes, bit for bit, what `fill` writes for the same weights.
llama.cpp may have the file mapped meanwhile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Change, TensorBytes
from echo_node.engine.gguf_families import HeaderValue
from echo_node.engine.gguf_map import ModelPlan, Place
from echo_node.errors import EngineError

BLOCK: Final = 32  # elements that share a scale in q8_0 and q4_0
_ALIGNMENT: Final = 32
_STEP: Final = 2**16  # elements that are converted at once: what the cache holds
_LARGEST: Final = {"f16": 65504.0, "q8_0": 65504.0 * 127, "q4_0": 65504.0 * 8}
"""Record of a GGUF type: f16 itself, or an f16 scale and its quantised steps."""
_OPEN_FILES: Final = Path("/proc/self/fd")

_TYPES: Final = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES: Final = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
# How a tensor lies in the file: one number per element, or one record per block.
_CELLS: Final[Mapping[str, np.dtype[Any]]] = {
    "f32": np.dtype("<u4"),
    "f16": np.dtype("<u2"),
    "bf16": np.dtype("<u2"),
    "q8_0": np.dtype("V34"),
    "q4_0": np.dtype("V18"),
}
_PATTERNS: Final[Mapping[str, np.dtype[Any]]] = {
    "bf16": np.dtype("<u2"),
    "f16": np.dtype("<u2"),
    "f32": np.dtype("<u4"),
}
KINDS: Final = tuple(_TYPES)
BLOCKED: Final = ("q8_0", "q4_0")

Bits = NDArray[np.uint16] | NDArray[np.uint32]
Single = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's part of the file."""

    place: Place
    kind: str
    offset: int

    @property
    def cells(self) -> int:
        """Number of values or blocks."""
        return math.prod(self.place.shape) // (BLOCK if self.kind in BLOCKED else 1)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.cells * _CELLS[self.kind].itemsize


def slot_kind(shape: tuple[int, ...], kind: str) -> str:
    """Return a tensor's type in a file of a kind; rows not of whole blocks are f16."""
    if len(shape) == 1:
        return "f32"  # llama.cpp adds and scales by nothing else
    return "f16" if kind in BLOCKED and shape[-1] % BLOCK else kind


def file_size(plan: ModelPlan, kind: str) -> int:
    """Bytes of all tensors."""
    slots = (Slot(place, slot_kind(place.shape, kind), 0) for place in plan.places.values())
    return sum(slot.size for slot in slots)


class GgufFile:
    """The file of one model. Its weights have no meaning before the first `fill`."""

    def __init__(self, path: Path, plan: ModelPlan, kind: str) -> None:
        self.path = path
        self.slots: dict[str, Slot] = {}
        start = _write_header(path, plan, kind)
        end = 0
        for name, place in plan.places.items():
            self.slots[name] = slot = Slot(place, slot_kind(place.shape, kind), start + end)
            end = _padded(end + slot.size)
        constants = [np.array(values, "<f4") for values in plan.constants.values()]
        sizes = [_padded(values.nbytes) for values in constants]
        _make_long(path, start + _padded(end) + sum(sizes))
        self._map: NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        for values, size in zip(constants, sizes, strict=True):
            self._map[start + end : start + end + values.nbytes] = values.view(np.uint8)
            end += size
        self._dtypes: dict[str, str] = {}
        self._held: int | None = None

    @property
    def size(self) -> int:
        return int(self._map.size)

    def cells(self, name: str) -> NDArray[Any]:
        """Return a tensor as a view of the file: writing to it writes the file."""
        slot = self.slots[name]
        return self._map[slot.offset : slot.offset + slot.size].view(_CELLS[slot.kind])

    def fill(self, weights: Mapping[str, TensorBytes]) -> None:
        """Write every tensor, all of which must be there.

        An error leaves the file as it was.
        """
        for name, slot in self.slots.items():
            dtype = weights[name].dtype
            bits = np.frombuffer(weights[name].data, _PATTERNS[dtype])
            for start in range(0, bits.size, _STEP):
                _check_range(name, bits[start : start + _STEP], dtype, slot.kind)
        for name, slot in self.slots.items():
            dtype = self._dtypes[name] = weights[name].dtype
            bits = np.frombuffer(weights[name].data, _PATTERNS[dtype])
            if slot.place.heads:
                source = np.argsort(slot.place.row_order())
                bits = bits.reshape(source.size, -1)[source].ravel()
            cells, wide = self.cells(name), bits.size // slot.cells
            for start in range(0, bits.size, _STEP):  # a multiple of the block
                part = _encode(bits[start : start + _STEP], dtype, slot)
                cells[start // wide : start // wide + part.size] = part

    def put(self, change: Change) -> None:
        """Write the changed elements of one tensor, in whole blocks where needed."""
        slot = self.slots.get(change.tensor)
        if slot is None:
            raise EngineError(f"a change of {change.tensor}, which the model does not have")
        positions, bits, dtype = change.positions, change.values, self._dtypes[change.tensor]
        if not positions.size:
            return
        if positions[0] < 0 or positions[-1] >= math.prod(slot.place.shape):
            raise EngineError(f"a change of {change.tensor} outside its shape {slot.place.shape}")
        if positions.size != bits.size or bits.dtype.itemsize != _PATTERNS[dtype].itemsize:
            raise EngineError(f"a change of {change.tensor} whose values do not match its positions or type")
        if slot.kind in BLOCKED:
            positions = _blocks(change.tensor, positions)
        if slot.place.heads:
            width = slot.cells // slot.place.shape[0]
            row, column = np.divmod(positions, width)
            positions = slot.place.row_order()[row] * width + column
        _check_range(change.tensor, bits, dtype, slot.kind)
        cells, wide = self.cells(change.tensor), bits.size // positions.size
        for start in range(0, bits.size, _STEP):
            part = _encode(bits[start : start + _STEP], dtype, slot)
            cells[positions[start // wide : start // wide + part.size]] = part

    def unname(self) -> bool:
        """Unlink the file where the system allows, so that it ends with the process.

        `path` still opens it, for this process alone.
        """
        if not _OPEN_FILES.is_dir():
            return False
        self._held = os.open(self.path, os.O_RDONLY)
        self.path.unlink()
        self.path = _OPEN_FILES / str(self._held)
        return True

    def close(self) -> None:
        """Let go of the file."""
        self._map = np.zeros(0, np.uint8)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _encode(bits: Bits, dtype: str, slot: Slot) -> NDArray[Any]:
    """Encode a part of a tensor, plus its slot's offset.

    Tensors with an offset are f32.
    """
    if not slot.place.shift:
        return encode(bits, dtype, slot.kind)
    shifted = _values(bits, dtype) + np.float32(slot.place.shift)
    return encode(shifted.view(np.uint32), "f32", slot.kind)


def encode(bits: Bits, dtype: str, kind: str) -> NDArray[Any]:
    """Bit patterns of a tensor's type as the cells of a file's type."""
    if dtype == kind:
        return bits
    if (dtype, kind) == ("bf16", "f16"):
        return np.take(_halves(), bits)
    values = _values(bits, dtype)
    if kind == "f32":
        return values.view("<u4")
    if kind == "f16":
        return values.astype("<f2").view("<u2")
    if kind == "q8_0":
        return _q8_0(values.reshape(-1, BLOCK))
    with np.errstate(over="ignore", invalid="ignore"):  # blocks of next to nothing
        width = BLOCK if kind in BLOCKED else values.size
        raw: NDArray[np.uint8] = gguf.quants.quantize(values.reshape(-1, width), _TYPES[kind])
    return raw.view(_CELLS[kind]).ravel()


def _values(bits: Bits, dtype: str) -> Single:
    if dtype == "bf16":  # the upper half of a float32
        wide = bits.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return bits.view(np.float16).astype(np.float32) if dtype == "f16" else bits.view(np.float32)


@cache
def _halves() -> NDArray[np.uint16]:
    """Return the f16 pattern of each bf16 pattern, as a lookup table.

    Looking up is several times as fast as converting.
    """
    values = _values(np.arange(2**16, dtype=np.uint16), "bf16")
    with np.errstate(over="ignore", invalid="ignore"):  # what f16 cannot hold is refused elsewhere
        return values.astype("<f2").view("<u2")


def _q8_0(blocks: Single) -> NDArray[Any]:
    """Quantise as ggml's reference does to q8_0 blocks.

    A block is an f16 scale and 32 signed bytes, rounded half away from zero.
    """
    cells = np.empty(len(blocks), np.dtype([("scale", "<f2"), ("steps", "i1", BLOCK)]))
    scale = np.ascontiguousarray(np.abs(blocks).T).max(axis=0) / np.float32(127)  # turned: four times as fast
    cells["scale"] = scale
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    inverse[~np.isfinite(inverse)] = 0  # a block of zeros, or of what f16 cannot tell from zero
    steps = blocks * inverse[:, None]
    half = (steps.view(np.uint32) & np.uint32(0x80000000)) | np.float32(0.49999997).view(np.uint32)
    steps += half.view(np.float32)  # of the same sign: with the cast, rounds as roundf does
    cells["steps"] = steps
    return cells.view(_CELLS["q8_0"])


def _check_range(name: str, bits: Bits, dtype: str, kind: str) -> None:
    """Refuse what the file's type cannot hold."""
    if kind not in _LARGEST or dtype == "f16" or not bits.size:
        return
    limit = _LARGEST[kind]
    shift, magnitude = (16, 0x7FFF) if dtype == "bf16" else (0, 0x7FFFFFFF)
    largest = int(
        (bits & bits.dtype.type(magnitude)).max()
    )  # patterns of one sign are ordered as their values
    value = float(np.array(largest << shift, np.uint32).view(np.float32))
    if not value <= limit:
        raise EngineError(
            f"weights {name} hold {value:g} or its negative, and {kind} ends at {limit:g}",
            advice="run the engine as bf16 or f32",
        )


def _blocks(name: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the blocks that positions fill."""
    if positions.size % BLOCK == 0:
        runs = positions.reshape(-1, BLOCK)
        if not (runs[:, 0] % BLOCK).any() and (runs[:, -1] - runs[:, 0] == BLOCK - 1).all():
            return runs[:, 0] // BLOCK
    raise EngineError(f"a change of {name} that is not in whole blocks of {BLOCK}")


def _write_header(path: Path, plan: ModelPlan, kind: str) -> int:
    """Write everything before the tensors; return where those begin."""
    writer = gguf.GGUFWriter(None, plan.architecture)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(plan.vocabulary)
    writer.add_context_length(plan.context)
    writer.add_block_count(plan.layers)
    writer.add_embedding_length(plan.hidden)
    writer.add_feed_forward_length(plan.feed_forward)
    writer.add_head_count(plan.heads)
    writer.add_head_count_kv(plan.kv_heads)
    writer.add_key_length(plan.head_size)
    writer.add_value_length(plan.head_size)
    writer.add_layer_norm_rms_eps(plan.epsilon)
    writer.add_rope_dimension_count(plan.head_size)
    writer.add_rope_freq_base(plan.theta)
    for key, value in plan.settings.items():
        _add(writer, f"{plan.architecture}.{key}", value)
    for place in plan.places.values():
        own = slot_kind(place.shape, kind)
        size = Slot(place, own, 0).size
        writer.add_tensor_info(place.name, place.shape, np.dtype(np.float32), size, _TYPES[own])
    for name, values in plan.constants.items():
        writer.add_tensor_info(name, (len(values),), np.dtype(np.float32), 4 * len(values), _TYPES["f32"])
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return _padded(path.stat().st_size)


def _add(writer: Any, key: str, value: HeaderValue) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _make_long(path: Path, size: int) -> None:
    """Allocate the file's disk space now.

    A full disk while writing to mapped memory would kill the process.
    """
    with path.open("r+b") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.seek(0, os.SEEK_END)
                for start in range(file.tell(), size, 2**20):
                    file.write(bytes(min(2**20, size - start)))
        except OSError as cause:
            raise EngineError(
                f"no room for a model of {size / 2**20:.0f} MB in {path.parent}: {cause}",
                advice="free some, or set another scratch folder",
            ) from cause


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
