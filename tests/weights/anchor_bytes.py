"""Anchors in memory: a state as the bytes of a safetensors file, and back."""

from __future__ import annotations

import safetensors

from echo_node.engine.base import TensorBytes
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.tensors import layout_of

_TYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def write_safetensors(state) -> bytes:
    return b"".join((FlatLayout(layout_of(state)).header, *(state[name].data for name in sorted(state))))


def read_safetensors(data: bytes) -> dict[str, TensorBytes]:
    """Read by the library, which knows nothing of ours."""
    return {
        name: TensorBytes(_TYPES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in sorted(safetensors.deserialize(data))
    }
