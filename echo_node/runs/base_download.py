"""Download the frozen base of a LoRA run from peers.

Frames arrive a few at a time, each checked by its hash, and are written to their place in the
file. A download that was broken off goes on after the frames that are there and right. What was
written is read once more at the end, against the manifest's root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import PeerError, boundary
from echo_node.models import adapter
from echo_node.models.folder import WEIGHTS
from echo_node.models.safetensors_file import map_tensors
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.net.rate_limit import Throttle
from echo_node.runs.adapter_folder import TABLE, settings_of
from echo_node.runtime.resource_limits import ResourceLimits
from echo_node.storage import files
from echo_node.weights.progress import PullProgress
from echo_node.weights.tensors import from_mapped, layout_of, root_of
from protocol import ChunkTable, Frame, blob_id, decode, encode, limits, merkle_root
from protocol.manifest import Adapter

AT_ONCE: Final = 256 * 1024 * 1024
"""Bytes of frames that are in memory at once."""
_WRONG: Final = "do not work for this run: its manifest contradicts itself"


async def download_base(
    network: Network,
    wanted: Adapter,
    folder: Path,
    providers: Collection[bytes],
    allowance: ResourceLimits,
    on_progress: Callable[[PullProgress | str], None],
    check_room: Callable[[int], None],
) -> None:
    """Download the base and the adapter's settings into a model's folder.

    What is there already is kept.
    """
    if (folder / WEIGHTS).is_file() and (folder / adapter.SETTINGS).is_file():
        return
    blobs = BlobClient(network, downlink=Throttle(allowance.down))
    want = Want(wanted.table, most=limits.TABLE_BYTES)
    data = (await blobs.fetch([want], named=providers))[wanted.table]
    with boundary(PeerError, "reading the table of the run's base", advice=_WRONG):
        frames = list(decode(ChunkTable, data))
        if merkle_root([frame.after for frame in frames]) != wanted.root:
            raise PeerError("the table of the run's base has another root than its manifest")
    total = sum(frame.size for frame in frames)
    check_room(total)
    part = folder / f"{WEIGHTS}.part"
    done = await trio.to_thread.run_sync(_right_frames, part, frames)
    for batch in _batches(frames[done:]):
        at = sum(frame.size for frame in frames[:done])
        on_progress(PullProgress("fetching the frozen base", 0, at, total, len(providers)))
        found = await blobs.fetch(
            [Want(frame.blob, size=frame.size) for frame in batch],
            named=providers,
            under=[wanted.table],
            most=AT_ONCE + limits.FRAME_BYTES,
        )
        await trio.to_thread.run_sync(_append, part, at, [found[frame.blob] for frame in batch])
        done += len(batch)
    await trio.to_thread.run_sync(_finish, folder, part, wanted, data)


def _batches(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    batch: list[Frame] = []
    for frame in frames:
        if batch and sum(each.size for each in batch) + frame.size > AT_ONCE:
            yield batch
            batch = []
        batch.append(frame)
    if batch:
        yield batch


def _right_frames(part: Path, frames: Sequence[Frame]) -> int:
    """Return how many frames a broken-off download has left, each as its hash says."""
    if not part.is_file():
        return 0
    with files.disk_errors(f"reading {part}"), part.open("rb") as file:
        for index, frame in enumerate(frames):
            if blob_id(file.read(frame.size)) != frame.blob:
                return index
    return len(frames)


def _append(part: Path, at: int, pieces: Sequence[bytes]) -> None:
    with files.disk_errors(f"writing {part}"), part.open("r+b" if part.is_file() else "w+b") as file:
        file.seek(at)
        for piece in pieces:
            file.write(piece)
        file.truncate()


def _finish(folder: Path, part: Path, wanted: Adapter, table: bytes) -> None:
    """Give the file its name, once it is proven to be the manifest's base."""
    with boundary(PeerError, "reading the run's base", advice=_WRONG):
        state = from_mapped(map_tensors(part))
    if blob_id(encode(layout_of(state))) != wanted.layout or root_of(state) != wanted.root:
        part.unlink()
        raise PeerError("the run's base is not the one that its manifest names", advice=_WRONG)
    with files.disk_errors(f"writing {folder}"):
        files.write_whole(folder / TABLE, table, durable=True)
        with part.open("r+b") as file:
            files.sync(file.fileno())
        part.replace(folder / WEIGHTS)
        files.sync_folder(folder, durable=True)
        # Last: a folder with the adapter's settings has its base.
        files.write_whole(folder / adapter.SETTINGS, adapter.settings_file(settings_of(wanted)), durable=True)
