"""Version 0 without the network: the weights of a Hugging Face folder, if they are the ones that the manifest means.

A folder is a shortcut and proves nothing: its root must be the manifest's, or it is left alone with a word to the
person. The files are mapped and read once, chunk by chunk. It knows no peers.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from echo_node.engine.base import Dtype, TensorBytes
from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.weights.source import FlatSource
from echo_node.weights.state import layout_of
from echo_node.weights.store import WeightsStore
from echo_node.weights.writing import RouteWriter
from protocol import Layout, blob_id, encode, merkle_root
from protocol.weights import ELEMENT_TYPES

log = logging.getLogger(__name__)

HEADER_BYTES: Final = 100 * 1024 * 1024
"""Of a safetensors file: what the library itself takes."""
_TYPES: Final[dict[str, Dtype]] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def layout_in(folder: Path, wanted: bytes) -> Layout | None:
    """The layout of a folder's weights, if it is the one of that id. Says why not, where there are weights."""
    try:
        with boundary(ConfigError, f"reading the weights in {folder}"):
            state = read_folder(folder)
            layout = layout_of(state) if state else None
            if layout is None or blob_id(encode(layout)) == wanted:
                return layout
    except EchoError as error:
        log.warning("the weights in %s are left alone: %s", folder, error)
        return None
    log.warning("the weights in %s are left alone: they have other tensors than this run's", folder)
    return None


def take_folder(store: WeightsStore, folder: Path) -> bool:
    """Put version 0 into the store's blobs as if it had been fetched. False: the folder has other weights. Blocks."""
    try:
        with boundary(ConfigError, f"reading the weights in {folder}"):
            writer = RouteWriter(store.flat, store.blobs, FlatSource(store.flat, read_folder(folder)))
            if merkle_root(writer.after) == store.follower.rules.root:
                writer.anchor()
                store.blobs.sync()
                return True
    except EchoError as error:
        log.warning("the weights in %s are left alone: %s", folder, error)
        return False
    log.warning(
        "the weights in %s are left alone: they are not those with which this run began; peers have them",
        folder,
    )
    return False


def read_folder(folder: Path) -> dict[str, TensorBytes]:
    """The tensors of all safetensors files of a folder, mapped."""
    state: dict[str, TensorBytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= dict(_tensors(path))
    return dict(sorted(state.items()))


def _tensors(path: Path) -> Iterator[tuple[str, TensorBytes]]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = (
            memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
        )
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(HEADER_BYTES, len(data) - 8):
        raise ConfigError(f"{path.name} is no safetensors file")
    header: dict[str, Any] = json.loads(bytes(data[8 : 8 + length]))
    body = data[8 + length :]
    for name, told in header.items():
        if name == "__metadata__":
            continue
        start, end = told["data_offsets"]
        dtype, shape = _TYPES.get(told["dtype"]), tuple(told["shape"])
        if dtype is None:
            raise ConfigError(f"{name[:64]!r} has the type {told['dtype']!r}, which the chain does not carry")
        elements = 1
        for each in shape:
            elements *= each
        if not 0 <= start <= end <= len(body) or end - start != elements * ELEMENT_TYPES[dtype]:
            raise ConfigError(f"{name[:64]!r} does not lie where {path.name} says")
        yield name, TensorBytes(dtype, shape, body[start:end])
