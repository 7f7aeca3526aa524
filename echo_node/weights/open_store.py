"""Open a run's store: layout from a folder or peers, version 0 from a folder."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import trio

from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.models.adapter import map_weights, read_adapter
from echo_node.models.folder import INDEX, WEIGHTS
from echo_node.models.safetensors_file import MappedTensor, map_tensors
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.weights.chain_log import Floor
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.route_writer import RouteWriter
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import from_mapped, layout_of
from protocol import Layout, Manifest, Opened, Rules, blob_id, decode, encode, limits, merkle_root

log = logging.getLogger(__name__)


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
    """Return the tensors of a folder's safetensors files, mapped; may be empty."""
    if read_adapter(folder) or (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        return from_mapped(map_weights(folder))
    found: dict[str, MappedTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= map_tensors(path)
    return from_mapped(found)


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
    """Fetch the layout that the manifest names.

    The type refuses names outside a folder.
    """
    peers = [peer for peer in dict.fromkeys((*rules.trainers, *named)) if peer != network.public]
    wants = [Want(rules.layout, most=limits.LAYOUT_BYTES)]
    found = await BlobClient(network).fetch(wants, named=[*peers, *sorted(network.peers() - {*peers})])
    return decode(Layout, found[rules.layout])
