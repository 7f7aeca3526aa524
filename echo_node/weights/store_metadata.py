"""Metadata of a store: the sealed manifest and the layout, as files beside it.

With them `echo-node weights` reads a store without the node. The manifest is proven by its
signature, the layout by the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, StoreError, boundary, looking_at
from echo_node.storage import files
from protocol import Layout, Manifest, Opened, Rules, blob_id, decode, encode, limits, open_manifest

_MANIFEST: Final = "manifest"
_LAYOUT: Final = "layout"


def write_metadata(folder: Path, manifest: Opened[Manifest], layout: Layout) -> None:
    """Write manifest and layout into a store's folder. Blocks."""
    with files.disk_errors(f"opening {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in ((_MANIFEST, manifest.sealed), (_LAYOUT, encode(layout))):
        if not (folder / name).exists():
            files.write_whole(folder / name, data, durable=True)
    files.sync_folder(folder, durable=True)


def read_metadata(folder: Path, manifest: Path | None = None) -> tuple[Opened[Manifest], Rules, Layout]:
    """Read the run and the layout of a store.

    `manifest` is another file to take the run from.
    """
    chosen = manifest or folder / _MANIFEST
    with looking_at(folder):
        is_store = (folder / "heads").is_dir()
    if not is_store:
        raise ConfigError(
            f"{folder} is no store of weights", advice="give the folder that the node was given"
        )
    with looking_at(chosen):
        is_named = chosen.is_file()
    if not is_named:
        raise ConfigError(f"{folder} does not say of which run it is", advice="give the run's --manifest")
    most = limits.MANIFEST_BYTES + limits.ENVELOPE_BYTES
    with boundary(ConfigError, f"reading {chosen}"):
        opened = open_manifest(files.read_whole(chosen, most))
    if not (folder / _LAYOUT).is_file():
        raise StoreError(f"{folder} has no layout", advice="start the node on it once, and it is fetched")
    with boundary(StoreError, f"reading the layout in {folder}"):
        data = files.read_whole(folder / _LAYOUT, limits.LAYOUT_BYTES)
        layout = decode(Layout, data)
    if blob_id(data) != opened.message.model.layout:
        raise StoreError(
            f"the layout in {folder} is not the one of that run", advice="is it another run's store?"
        )
    return opened, Rules.of(opened), layout
