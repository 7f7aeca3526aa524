"""Export a version from a store as a folder that other programs open.

The weights are one safetensors file, the same bytes as an anchor; the model's small files are those
that the manifest names, as far as they are at hand, each checked against its hash. Of a LoRA run it
is a folder that PEFT opens, or, merged into the base, one of a whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echo_node.errors import ConfigError, StoreError, looking_at
from echo_node.models.adapter import (
    PEFT_SETTINGS,
    PEFT_WEIGHTS,
    AdapterSettings,
    read_adapter,
    settings_file,
)
from echo_node.models.folder import WEIGHTS
from echo_node.storage import files
from echo_node.weights.merge_adapter import write_merged
from echo_node.weights.store import WeightsStore
from protocol import Layout, Manifest, Rules, blob_id
from protocol.manifest import ModelFile


@dataclass(frozen=True, slots=True)
class Exported:
    """Written files, and files named by the manifest that are not at hand."""

    version: int
    size: int
    missing: tuple[str, ...]


def export_version(
    folder: Path,
    to: Path,
    manifest: Manifest,
    rules: Rules,
    layout: Layout,
    *,
    version: int | None = None,
    model: Path | None = None,
    merged: bool = False,
) -> Exported:
    """Write a version to a folder; the active one if none is named. Blocks.

    With `merged` the adapter of a LoRA run is added to its base, which is in the folder `model`.
    """
    adapter = _settings(manifest)
    if merged and adapter is None:
        raise ConfigError(
            "the run trains a whole model: there is nothing to merge", advice="leave --merged out"
        )
    if merged and (model is None or read_adapter(model) != adapter):
        raise ConfigError(
            "merging needs the base of the run's adapter",
            advice="give the run's own model folder with --model",
        )
    with looking_at(to, advice="name a new folder, in one of yours"):
        is_there = to.exists()
    if is_there:
        raise ConfigError(f"{to} exists", advice="name a folder that does not")
    with WeightsStore.open(folder, rules, layout) as store:
        head = store.tip
        if version is not None:
            head = next((each for each in store.follower.heads if each.message.version == version), None)
        if head is None:
            what = "no version is held" if version is None else f"version {version} is not in this chain"
            raise StoreError(what, advice="see `echo-node weights log`")
        is_tip = store.tip is not None and store.tip.id == head.id
        with (
            store.lease() if is_tip else store.materialise(head.id) as held,
            files.disk_errors(f"writing {to}"),
        ):
            to.mkdir(parents=True)
            if merged and adapter is not None and model is not None:
                write_merged(model, held.state, adapter, to / WEIGHTS)
            else:
                with (to / (WEIGHTS if adapter is None else PEFT_WEIGHTS)).open("xb") as file:
                    file.write(store.flat.header)
                    for tensor in store.flat.tensors:
                        file.write(held.state[tensor.name].data)
                if adapter is not None:
                    (to / PEFT_SETTINGS).write_bytes(settings_file(adapter))
        missing = [each.name for each in manifest.model.files if not _copy(each, store, model, to)]
        size = (to / WEIGHTS).stat().st_size if merged else store.flat.anchor_size
        return Exported(head.message.version, size, tuple(missing))


def _settings(manifest: Manifest) -> AdapterSettings | None:
    found = manifest.model.adapter
    return AdapterSettings(found.rank, found.alpha, found.targets) if found else None


def _copy(file: ModelFile, store: WeightsStore, model: Path | None, to: Path) -> bool:
    """Copy a small file from the store or a folder, if its hash matches."""
    places = [store.blobs.path(file.blob), *([model / file.name] if model else [])]
    for place in places:
        if place.is_file():
            data = files.read_whole(place, file.size) if place.stat().st_size == file.size else b""
            if blob_id(data) == file.blob:
                files.write_whole(to / file.name, data, durable=False)
                return True
    return False
