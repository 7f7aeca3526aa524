"""A newcomer with nothing but a manifest: the model's small files and the newest weights, from peers, as a model's folder.

Every file is checked against the hash that the manifest names, and the weights against the chain of signed heads, whose
first state the manifest names. What has arrived is kept, and a second start fetches nothing. It runs no model.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, TypeAlias

import trio

from echo_node.allowance import EVERYTHING, Allowance
from echo_node.errors import ConfigError, PeerError, boundary
from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.holders import Want
from echo_node.net.throttle import Throttle, Uplink
from echo_node.weights import disk
from echo_node.weights.flat import FlatLayout
from echo_node.weights.opening import fetch_layout, open_store
from echo_node.weights.progress import Pulling
from echo_node.weights.pull import Puller
from protocol import Link, Manifest, Opened, Rules, blob_id
from protocol.manifest import ModelFile

log = logging.getLogger(__name__)

Tell: TypeAlias = Callable[[Pulling | str], None]
"""Who hears how far it is, or what is in the way."""
ARRIVE_PAUSES: Final = (1.0, 2.0, 5.0, 10.0)
"""Between tries to fetch what nobody has given yet; the last one goes on."""
_WEIGHTS: Final = "model.safetensors"
_KINDS: Final = frozenset({".json", ".txt", ".model", ".jinja"})
"""Of the small files."""
STATES: Final = 4
"""What a node that follows has on disk, in states: the model's file, the one that is held, and two anchors to build from."""
_SPARE: Final = 1.2
"""Room on disk beyond what is fetched."""


def has_arrived(folder: Path, manifest: Manifest) -> bool:
    """Whether a run's model is here from an earlier start: the weights come last, and under their name when they are whole."""
    return (folder / _WEIGHTS).is_file() and all(_is_here(folder, file) for file in manifest.model.files)


def _is_here(folder: Path, file: ModelFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size and blob_id(path.read_bytes()) == file.blob


async def arrive(
    network: Network,
    manifest: Opened[Manifest],
    folder: Path,
    *,
    link: Link | None = None,
    allowance: Allowance = EVERYTHING,
    tell: Tell = lambda _now: None,
) -> Path:
    """The run's model in `folder`/model, with its weights in a store beside it. Goes on trying until it has them."""
    model = folder / "model"
    if has_arrived(model, manifest.message):
        return model
    _check_names(manifest.message)
    with boundary(ConfigError, f"making {model}", advice="give another folder with --state"):
        model.mkdir(parents=True, exist_ok=True)
    small = sum(file.size for file in manifest.message.model.files)
    _check_room(small, folder, allowance.disk)
    await _patiently(lambda: _fetch_files(network, manifest.message, model, allowance), tell)
    await _patiently(lambda: _fetch_weights(network, manifest, folder, model, link, allowance, tell), tell)
    return model


async def _patiently(work: Callable[[], object], tell: Tell) -> None:
    """Peers come and go: what cannot be had now may be had soon."""
    tries = 0
    while True:
        try:
            await work()  # type: ignore[misc] # a coroutine
        except PeerError as error:
            pause = ARRIVE_PAUSES[min(tries, len(ARRIVE_PAUSES) - 1)]
            tries += 1
            tell(f"{error}; next try in {pause:g} s")
            await trio.sleep(pause)
        else:
            return


def _helpers(network: Network, manifest: Manifest) -> Collection[bytes]:
    known = [key for key in (*manifest.trainers, *manifest.verifiers) if key != network.public]
    return list(dict.fromkeys((*known, *sorted(network.peers()))))


async def _fetch_files(network: Network, manifest: Manifest, model: Path, allowance: Allowance) -> None:
    blobs = Blobs(network, downlink=Throttle(allowance.down))
    for file in manifest.model.files:  # one by one: together they may be larger than the memory
        if _is_here(model, file):
            continue
        want = Want(file.blob, size=file.size, most=file.size)
        found = await blobs.fetch([want], named=_helpers(network, manifest), most=file.size)
        await trio.to_thread.run_sync(_write, model / file.name, found[file.blob])


def _write(path: Path, data: bytes) -> None:
    disk.write_whole(path, data, durable=True)


async def _fetch_weights(
    network: Network,
    manifest: Opened[Manifest],
    folder: Path,
    model: Path,
    link: Link | None,
    allowance: Allowance,
    tell: Tell,
) -> None:
    rules = Rules.of(manifest)
    layout = await fetch_layout(network, rules, _helpers(network, manifest.message))
    with boundary(PeerError, "reading the run's layout"):
        needed = STATES * FlatLayout(layout).anchor_size
    _check_room(needed, folder, allowance.disk)  # before a store takes its room
    floor = (link.term, link.version, link.head) if link else None

    async with open_store(
        folder / "weights",
        rules,
        network,
        manifest=manifest,
        named=_helpers(network, manifest.message),
        floor=floor,
    ) as store:
        puller = Puller(
            network,
            store,
            named=_helpers(network, manifest.message),
            uplink=Uplink(allowance.up),
            downlink=Throttle(allowance.down),
            tell=tell,
        )
        async with puller.work():
            await _pull_newest(puller, _helpers(network, manifest.message), tell)

        def write() -> None:
            draft = model / f"{_WEIGHTS}.part"
            with store.lease() as held, disk.touching(f"writing {draft}"), draft.open("wb") as file:
                file.write(store.flat.header)
                for tensor in store.flat.tensors:
                    file.write(held.state[tensor.name].data)
                file.flush()
                disk.sync(file.fileno())
            draft.replace(model / _WEIGHTS)
            disk.sync_folder(model, durable=True)

        await trio.to_thread.run_sync(write)


async def _pull_newest(puller: Puller, helpers: Collection[bytes], tell: Tell) -> None:
    """Hold the newest version that can be had, however often it takes; a newer head is tried at once."""
    for tries in itertools.count():
        pause = ARRIVE_PAUSES[min(tries, len(ARRIVE_PAUSES) - 1)]
        await puller.hearing.ask_around(helpers)
        tip = puller.hearing.tip
        try:
            await puller.pull()
        except PeerError as error:
            tell(f"{error}; next try in {pause:g} s")
            with trio.move_on_after(pause):
                await puller.hearing.wait_for_newer(tip.id if tip else None)
        else:
            return


def _check_names(manifest: Manifest) -> None:
    """A model's small files are data: no program, no other weights, no adapter that points elsewhere."""
    for file in manifest.model.files:
        if Path(file.name).suffix not in _KINDS or file.name.startswith("adapter_"):
            raise PeerError(
                f"the manifest names {file.name!r} among the model's small files, which is none that a model needs",
                advice="do not work for this run",
            )


def _check_room(bytes_needed: int, folder: Path, most: int | None) -> None:
    needed = _SPARE * bytes_needed
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
