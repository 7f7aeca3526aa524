"""Open the store of a run: layout from a folder or peers, version 0 from the folder."""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.engine.base import Dtype, TensorBytes
from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.weights.chain_log import Floor
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.route_writer import RouteWriter
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of
from protocol import Layout, Manifest, Opened, Rules, blob_id, decode, encode, limits, merkle_root
from protocol.weights import ELEMENT_TYPES

log = logging.getLogger(__name__)

HEADER_BYTES: Final = 100 * 1024 * 1024
"""Longest header of a safetensors file in bytes, as in the library."""
_TYPES: Final[dict[str, Dtype]] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def layout_in(folder: Path, wanted: bytes) -> Layout | None:
    """Return the layout of a folder's weights if it has that id; log why not."""
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
    """Put version 0 into the store's blobs as if it had been fetched. Blocks.

    Return False if the folder has other weights.
    """
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
    """Return the tensors of all safetensors files in a folder, mapped."""
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
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype, shape = _TYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise ConfigError(
                f"{name[:64]!r} has the type {entry['dtype']!r}, which the chain does not carry"
            )
        elements = 1
        for each in shape:
            elements *= each
        if not 0 <= start <= end <= len(body) or end - start != elements * ELEMENT_TYPES[dtype]:
            raise ConfigError(f"{name[:64]!r} does not lie where {path.name} says")
        yield name, TensorBytes(dtype, shape, body[start:end])


@asynccontextmanager
async def open_store(
    folder: Path | None,
    rules: Rules,
    network: Network,
    *,
    model: Path | None = None,
    manifest: Opened[Manifest] | None = None,
    named: Collection[bytes] = (),
    floor: Floor | None = None,
) -> AsyncGenerator[WeightsStore]:
    """Open the store in a folder, or a temporary one.

    `model` is a Hugging Face folder that may have version 0. With its `manifest` a store on disk
    can be read without the node, by `echo-node weights`.
    """
    layout = await trio.to_thread.run_sync(layout_in, model, rules.layout) if model else None
    shortcut = layout is not None
    if layout is None:
        layout = await fetch_layout(network, rules, named)
    if folder is not None and manifest is not None:
        await trio.to_thread.run_sync(write_metadata, folder, manifest, layout)
    opening: AbstractContextManager[WeightsStore] = (
        WeightsStore.temporary(rules, layout)
        if folder is None
        else WeightsStore.open(folder, rules, layout, floor=floor)
    )
    store = await trio.to_thread.run_sync(opening.__enter__)
    try:
        if model and shortcut and store.tip is None:
            await trio.to_thread.run_sync(take_folder, store, model)
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(opening.__exit__, None, None, None)


async def fetch_layout(network: Network, rules: Rules, named: Collection[bytes] = ()) -> Layout:
    """Fetch the layout that the manifest names. The type refuses names outside a folder."""
    peers = [peer for peer in dict.fromkeys((*rules.trainers, *named)) if peer != network.public]
    wants = [Want(rules.layout, most=limits.LAYOUT_BYTES)]
    found = await BlobClient(network).fetch(wants, named=[*peers, *sorted(network.peers() - {*peers})])
    return decode(Layout, found[rules.layout])
