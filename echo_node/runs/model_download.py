"""Download a run from peers: data set, small model files, newest weights.

Every file is checked against the hash in the manifest, and the weights against the chain of
signed heads, whose first state the manifest names. What has arrived is kept, so a second start
fetches nothing.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import trio

from echo_node.contract.code_folder import WHEELS
from echo_node.contract.wheel_reader import file_of
from echo_node.errors import ConfigError, PeerError, boundary
from echo_node.models import adapter
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.runs.base_download import download_base
from echo_node.runs.dataset import FILE as DATA_FILE
from echo_node.runtime.resource_limits import EVERYTHING, ResourceLimits
from echo_node.storage import files
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.open_store import fetch_layout, open_store
from echo_node.weights.progress import PullProgress
from echo_node.weights.puller import Puller
from protocol import Link, Manifest, Opened, Rules, blob_id
from protocol.manifest import DataSet, ModelFile, Wheel

log = logging.getLogger(__name__)

ProgressCallback: TypeAlias = Callable[[PullProgress | str], None]
"""Callback for progress, or for the reason of a delay."""
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts; the last one repeats."""
_WEIGHTS: Final = "model.safetensors"
_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja"})
"""File types that a model's small files may have."""
STATES: Final = 4
"""Disk space of a node, in states: the model's file, the active version, and two anchors."""
_SPACE_FACTOR: Final = 1.2
"""Factor of free space required beyond what is fetched."""


def is_downloaded(folder: Path, manifest: Manifest) -> bool:
    """Return whether a run's model was downloaded by an earlier start.

    The weights are written last, and under their name only when they are complete.
    """
    return _weights_file(folder, manifest).is_file() and all(
        _is_valid(folder, file) for file in manifest.model.files
    )


def _weights_file(folder: Path, manifest: Manifest) -> Path:
    """Return the file of what is trained: the adapter, or the whole model."""
    return folder / (_WEIGHTS if manifest.model.adapter is None else adapter.WEIGHTS)


def _is_valid(folder: Path, file: ModelFile) -> bool:
    return _is_blob(folder / file.name, file.blob, file.size)


def _is_blob(path: Path, blob: bytes, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size and blob_id(path.read_bytes()) == blob


async def download_run(
    network: Network,
    manifest: Opened[Manifest],
    folder: Path,
    *,
    link: Link | None = None,
    allowance: ResourceLimits = EVERYTHING,
    on_progress: ProgressCallback = lambda _now: None,
) -> Path:
    """Download the run's model into `folder`/model and its weights beside it.

    The weights go into a store. Retries until both are there.
    """
    await download_data_and_code(
        network, manifest.message, folder, allowance=allowance, on_progress=on_progress
    )
    model = folder / "model"
    if is_downloaded(model, manifest.message):
        return model
    _check_names(manifest.message)
    with boundary(ConfigError, f"making {model}", advice="give another folder with --state"):
        model.mkdir(parents=True, exist_ok=True)
    small = sum(file.size for file in manifest.message.model.files)
    _check_room(small, folder, allowance.disk)
    await _retry(lambda: _fetch_files(network, manifest.message, model, allowance), on_progress)
    if (frozen := manifest.message.model.adapter) is not None:

        def fetch_base() -> object:
            return download_base(
                network,
                frozen,
                model,
                _providers(network, manifest.message),
                allowance,
                on_progress,
                lambda size: _check_room(size, folder, allowance.disk),
            )

        await _retry(fetch_base, on_progress)
    await _retry(
        lambda: _fetch_weights(network, manifest, folder, model, link, allowance, on_progress), on_progress
    )
    return model


async def download_data_and_code(
    network: Network,
    manifest: Manifest,
    folder: Path,
    *,
    allowance: ResourceLimits = EVERYTHING,
    on_progress: ProgressCallback = lambda _now: None,
) -> None:
    """Download the run's data set and wheels, if it has any, into `folder`.

    Retries until they are there.
    """
    wheels = manifest.contract.wheel or ()
    wanted: list[tuple[Path, DataSet | Wheel]] = [
        *((folder / DATA_FILE, each) for each in manifest.data),
        *((folder / WHEELS / file_of(each), each) for each in wheels),
    ]
    for path, each in wanted:
        if await trio.to_thread.run_sync(_is_blob, path, each.blob, each.size):
            continue
        with boundary(ConfigError, f"making {path.parent}", advice="give another folder with --state"):
            await trio.Path(path.parent).mkdir(parents=True, exist_ok=True)
        _check_room(each.size, folder, allowance.disk)
        want = Want(each.blob, size=each.size, most=each.size)
        await _retry(partial(_fetch_to, network, manifest, path, want, allowance), on_progress)


async def _fetch_to(
    network: Network, manifest: Manifest, path: Path, want: Want, allowance: ResourceLimits
) -> None:
    blobs = BlobClient(network, downlink=Throttle(allowance.down))
    found = await blobs.fetch([want], named=_providers(network, manifest), most=want.most)
    await trio.to_thread.run_sync(_write, path, found[want.blob])


async def _retry(work: Callable[[], object], on_progress: ProgressCallback) -> None:
    """Retry until it succeeds: peers come and go."""
    tries = 0
    while True:
        try:
            await work()  # type: ignore[misc] # a coroutine
        except PeerError as error:
            pause = RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)]
            tries += 1
            on_progress(f"{error}; next try in {pause:g} s")
            await trio.sleep(pause)
        else:
            return


def _providers(network: Network, manifest: Manifest) -> Collection[bytes]:
    known = [key for key in (*manifest.trainers, *manifest.verifiers) if key != network.public]
    return list(dict.fromkeys((*known, *sorted(network.peers()))))


async def _fetch_files(network: Network, manifest: Manifest, model: Path, allowance: ResourceLimits) -> None:
    for file in manifest.model.files:  # one by one: together they may be larger than the memory
        if not _is_valid(model, file):
            want = Want(file.blob, size=file.size, most=file.size)
            await _fetch_to(network, manifest, model / file.name, want, allowance)


def _write(path: Path, data: bytes) -> None:
    files.write_whole(path, data, durable=True)


async def _fetch_weights(
    network: Network,
    manifest: Opened[Manifest],
    folder: Path,
    model: Path,
    link: Link | None,
    allowance: ResourceLimits,
    on_progress: ProgressCallback,
) -> None:
    rules = Rules.of(manifest)
    layout = await fetch_layout(network, rules, _providers(network, manifest.message))
    with boundary(PeerError, "reading the run's layout"):
        needed = STATES * FlatLayout(layout).anchor_size
    _check_room(needed, folder, allowance.disk)  # before a store takes its room
    floor = (link.term, link.version, link.head) if link else None

    async with open_store(
        folder / "weights",
        rules,
        network,
        manifest=manifest,
        named=_providers(network, manifest.message),
        floor=floor,
    ) as store:
        puller = Puller(
            network,
            store,
            named=_providers(network, manifest.message),
            uplink=UploadLimit(allowance.up),
            downlink=Throttle(allowance.down),
            on_progress=on_progress,
        )
        async with puller.work():
            await _pull_newest(puller, _providers(network, manifest.message), on_progress)

        def write() -> None:
            target = _weights_file(model, manifest.message)
            draft = target.with_name(f"{target.name}.part")
            with store.lease() as held, files.disk_errors(f"writing {draft}"), draft.open("wb") as file:
                file.write(store.flat.header)
                for tensor in store.flat.tensors:
                    file.write(held.state[tensor.name].data)
                file.flush()
                files.sync(file.fileno())
            draft.replace(target)
            files.sync_folder(model, durable=True)

        await trio.to_thread.run_sync(write)


async def _pull_newest(puller: Puller, providers: Collection[bytes], on_progress: ProgressCallback) -> None:
    """Pull the newest available version, with retries; a newer head is tried at once."""
    for tries in itertools.count():
        pause = RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)]
        await puller.chain.ask_around(providers)
        tip = puller.chain.tip
        try:
            await puller.pull()
        except PeerError as error:
            on_progress(f"{error}; next try in {pause:g} s")
            with trio.move_on_after(pause):
                await puller.chain.wait_for_newer(tip.id if tip else None)
        else:
            return


def _check_names(manifest: Manifest) -> None:
    """Refuse files that are no model data: programs, other weights, adapters."""
    for file in manifest.model.files:
        if Path(file.name).suffix not in _SUFFIXES or file.name.startswith("adapter_"):
            raise PeerError(
                f"the manifest names {file.name!r} among the model's small files, which is none that a model needs",
                advice="do not work for this run",
            )


def _check_room(bytes_needed: int, folder: Path, most: int | None) -> None:
    needed = _SPACE_FACTOR * bytes_needed
    room = shutil.disk_usage(folder).free
    if most is not None and most < needed:
        raise ConfigError(
            f"the weights need {needed / 1e9:.2f} GB, and --max-disk allows {most / 1e9:.2f}",
            advice="allow more, or take another run",
        )
    if room < needed:
        raise ConfigError(
            f"the weights need {needed / 1e9:.2f} GB, and {room / 1e9:.2f} GB are free in {folder}",
            advice="make room, or give a folder on another disk with --state",
        )
