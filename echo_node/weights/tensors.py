"""Canonical state: named tensors as bytes, sorted by name, flat, in hashed chunks.

A tensor is a type, a shape and bytes. An anchor is this state as a safetensors file, whose header
`flat_layout.py` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from echo_node.engine.base import Dtype, TensorBytes
from echo_node.errors import ConfigError
from echo_node.models.safetensors_file import MappedTensor
from protocol import Layout, blob_id, limits, merkle_root
from protocol.weights import ELEMENT_TYPES, TensorEntry

_FROM_FILE: Final[dict[str, Dtype]] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


State = Mapping[str, TensorBytes]
"""Tensors by their names in the model's own files; tied weights appear once."""


def layout_of(state: State) -> Layout:
    """Return the layout of a state: names, types and shapes."""
    return Layout(tuple(TensorEntry(name, state[name].dtype, state[name].shape) for name in sorted(state)))


def chunks(state: State) -> Iterator[bytes]:
    """Iterate over the flat state in chunks of a fixed number of elements."""
    waiting: list[bytes] = []
    room = limits.CHUNK_ELEMENTS
    for name in sorted(state):
        tensor = state[name]
        size, at = ELEMENT_TYPES[tensor.dtype], 0
        while at < len(tensor.data):
            piece = bytes(tensor.data[at : at + room * size])
            waiting.append(piece)
            at += len(piece)
            room -= len(piece) // size
            if room == 0:
                yield b"".join(waiting)
                waiting, room = [], limits.CHUNK_ELEMENTS
    if waiting:
        yield b"".join(waiting)


def chunk_hashes(state: State) -> list[bytes]:
    return [blob_id(chunk) for chunk in chunks(state)]


def root_of(state: State) -> bytes:
    """Return the Merkle root of the chunk hashes, as in a head."""
    return merkle_root(chunk_hashes(state))


def from_mapped(found: Mapping[str, MappedTensor]) -> dict[str, TensorBytes]:
    """Return mapped tensors as a state; refuse types that the wire does not have."""
    state = {}
    for name in sorted(found):
        dtype, shape, data = found[name]
        if dtype not in _FROM_FILE:
            raise ConfigError(f"tensor {name[:64]!r} has the type {dtype!r}, which the chain does not carry")
        state[name] = TensorBytes(_FROM_FILE[dtype], shape, data)
    return state
