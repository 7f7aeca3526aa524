"""Model folder of a LoRA run: frozen base as an anchor's file, and adapter.

The base's file is byte for byte the anchor of its layout, so that its frames, which the table
names, are ranges of the file: a node serves them without a copy.
"""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.models import adapter
from echo_node.models.adapter import AdapterSettings, adapter_tensors, base_shapes, write_first_adapter
from echo_node.models.folder import WEIGHTS, map_folder
from echo_node.models.intake import MODEL_FILES
from echo_node.models.progress import Progress, no_progress
from echo_node.net.blobs.blob_registry import InFile
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.route_reader import ANCHOR_CODEC
from echo_node.weights.tensors import State, from_mapped, layout_of
from protocol import ChunkTable, Frame, Layout, blob_id, decode, encode, limits, merkle_root
from protocol.manifest import Adapter

TABLE: Final = "base.table"
"""Table of the base's frames, in a model's folder."""
_AGAIN: Final = "join the run in an empty state folder, or make it anew: echo-node run new"


def make_adapter_folder(
    base: Path, to: Path, settings: AdapterSettings, seed: bytes, progress: Progress = no_progress
) -> Path:
    """Write the folder of a run that trains an adapter on the model of `base`."""
    tensors = adapter_tensors(base_shapes(base), settings)
    with boundary(StoreError, f"writing {to}", advice="make room on that disk, or give another folder"):
        to.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (base / name).is_file():
                shutil.copyfile(base / name, to / name)
        state = from_mapped(map_folder(base))
        flat = FlatLayout(layout_of(state))
        (to / WEIGHTS).unlink(missing_ok=True)
        if _is_anchor(base / WEIGHTS, flat):
            _link_or_copy(base / WEIGHTS, to / WEIGHTS)
        else:
            _write_anchor(to / WEIGHTS, flat, state, progress)
        (to / TABLE).write_bytes(encode(_table(flat, state)))
        write_first_adapter(to / adapter.WEIGHTS, tensors, seed)
        (to / adapter.SETTINGS).write_bytes(adapter.settings_file(settings))
    return to


def describe_adapter(folder: Path, norm: float) -> Adapter:
    """Return the adapter's part of a manifest."""
    settings = adapter.read_adapter(folder)
    if settings is None:
        raise ConfigError(f"{folder} holds no adapter", advice=_AGAIN)
    table = read_table(folder)
    return Adapter(
        alpha=settings.alpha,
        layout=blob_id(encode(base_layout(folder))),
        norm=norm,
        rank=settings.rank,
        root=merkle_root([frame.after for frame in table]),
        table=blob_id(encode(table)),
        targets=settings.targets,
    )


def check_adapter_folder(folder: Path, wanted: Adapter | None) -> None:
    """Refuse a folder whose adapter or base is not the manifest's."""
    found = adapter.read_adapter(folder)
    if wanted is None:
        if found is not None:
            raise ConfigError(
                f"{folder} is the folder of an adapter, and the run trains a whole model",
                advice="give the run's own model with --model",
            )
        return
    if found is None:
        raise ConfigError(
            f"{folder} has no adapter, and the run trains one of rank {wanted.rank}", advice=_AGAIN
        )
    if found != settings_of(wanted):
        raise ConfigError(
            f"the adapter in {folder} has rank {found.rank}, alpha {found.alpha:g} and the targets"
            f" {', '.join(found.targets)}; the run's has {wanted.rank}, {wanted.alpha:g} and {', '.join(wanted.targets)}",
            advice=_AGAIN,
        )
    if blob_id(encode(base_layout(folder))) != wanted.layout or blob_id(read_bytes(folder)) != wanted.table:
        raise ConfigError(f"the base in {folder} is not the one that the run's adapter is for", advice=_AGAIN)


def settings_of(wanted: Adapter) -> AdapterSettings:
    """Return the settings of a manifest's adapter."""
    return AdapterSettings(wanted.rank, wanted.alpha, wanted.targets)


def base_layout(folder: Path) -> Layout:
    return layout_of(from_mapped(map_folder(folder)))


def read_bytes(folder: Path) -> bytes:
    """Return the bytes of a folder's table; nothing if there is none."""
    path = folder / TABLE
    if not path.is_file() or path.stat().st_size > limits.TABLE_BYTES:
        return b""
    return path.read_bytes()


def read_table(folder: Path) -> ChunkTable:
    """Return the table of a folder's base."""
    with boundary(ConfigError, f"reading {folder / TABLE}", advice=_AGAIN):
        return decode(ChunkTable, read_bytes(folder))


def base_files(folder: Path) -> dict[bytes, InFile]:
    """Return the base's table and frames by hash, to serve to newcomers."""
    data, weights = read_bytes(folder), folder / WEIGHTS
    found = {blob_id(data): InFile(folder / TABLE, len(data))}
    offset = 0
    for frame in read_table(folder):
        found[frame.blob] = InFile(weights, frame.size, offset)
        offset += frame.size
    return found


def _table(flat: FlatLayout, state: State) -> ChunkTable:
    source = FlatSource(flat, state)
    frames = [
        Frame(
            blob_id(source.anchor(start, end).tobytes()), end - start, blob_id(source.chunk(chunk).tobytes())
        )
        for chunk, (start, end) in zip(flat.chunks, pairwise(flat.anchor_cuts()), strict=True)
    ]
    return ChunkTable.of(ANCHOR_CODEC, frames)


def _is_anchor(path: Path, flat: FlatLayout) -> bool:
    if not path.is_file() or path.stat().st_size != flat.anchor_size:
        return False
    with path.open("rb") as file:
        return file.read(len(flat.header)) == flat.header


def _link_or_copy(source: Path, to: Path) -> None:
    try:
        os.link(source.resolve(), to)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, to)


def _write_anchor(path: Path, flat: FlatLayout, state: State, progress: Progress) -> None:
    done = 0
    with path.open("wb") as file:
        file.write(flat.header)
        for tensor in flat.tensors:
            file.write(state[tensor.name].data)
            done += tensor.size
            progress("writing the base", done, flat.size)
