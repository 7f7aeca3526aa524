"""A store for a run, opened with what is at hand: the layout from a folder or from peers, version 0 from the folder.

It is where the store and the network meet for the first time; afterwards the puller has both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import trio

from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.holders import Want
from echo_node.weights.journal import Floor
from echo_node.weights.local import layout_in, take_folder
from echo_node.weights.papers import write_papers
from echo_node.weights.store import WeightsStore
from protocol import Layout, Manifest, Opened, Rules, decode, limits


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
    """The store in a folder, or one that is gone afterwards. `model` is a Hugging Face folder that may have version 0.

    With its `manifest` a store on disk can be looked at without the node, by `echo-node weights`.
    """
    layout = await trio.to_thread.run_sync(layout_in, model, rules.layout) if model else None
    shortcut = layout is not None
    if layout is None:
        layout = await fetch_layout(network, rules, named)
    if folder is not None and manifest is not None:
        await trio.to_thread.run_sync(write_papers, folder, manifest, layout)
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
    """The layout that the manifest names, from whoever has it. The type refuses names that lead out of a folder."""
    peers = [peer for peer in dict.fromkeys((*rules.trainers, *named)) if peer != network.public]
    wants = [Want(rules.layout, most=limits.LAYOUT_BYTES)]
    found = await Blobs(network).fetch(wants, named=[*peers, *sorted(network.peers() - {*peers})])
    return decode(Layout, found[rules.layout])
