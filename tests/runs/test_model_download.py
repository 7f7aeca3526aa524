"""What a newcomer downloads from strangers, and what it refuses to write to its disk."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import trio

from echo_node.errors import ConfigError, PeerError
from echo_node.models import embedded
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.net.rate_limit import Throttle
from echo_node.node import Node
from echo_node.runs.model_download import download_run, is_downloaded
from echo_node.runs.run import read_model
from echo_node.runtime.resource_limits import ResourceLimits
from echo_node.telemetry.metrics import Records
from echo_node.weights.publisher import Publisher
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import ZERO, Identity, Layout, blob_id, encode, open_manifest, seal
from protocol.manifest import ModelFile
from protocol.weights import TensorEntry
from tests.crafting import TRAINER, open_run, roster

RUN = open_run()
NEWCOMER = Identity(bytes(31) + b"n")


def manifest_with(**changes):
    """The run's manifest with another model, as its author could have sealed it."""
    told = dataclasses.replace(RUN.manifest, model=dataclasses.replace(RUN.manifest.model, **changes))
    return open_manifest(seal(told, TRAINER, ZERO))


async def test_a_newcomer_gets_the_model_and_keeps_it(tmp_path):
    state = read_model(embedded.folder())
    with WeightsStore.temporary(RUN.rules, layout_of(state)) as store:
        Publisher(store, TRAINER, luck=lambda: bytes(32)).publish(state, step=0, roster=roster(), groups=())
        async with (
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as leader,
            WeightsSeeder(leader, store, files=RUN.files()).serve(),
            swarm.join(NEWCOMER) as newcomer,
        ):
            model = await download_run(newcomer, RUN.sealed_manifest, tmp_path)
            assert read_model(model) == state
    for file in RUN.manifest.model.files:
        assert (model / file.name).read_bytes() == (embedded.folder() / file.name).read_bytes()
    assert is_downloaded(model, RUN.manifest)
    assert not list(model.glob("*.part"))
    (model / "config.json").write_text("{}")
    assert not is_downloaded(model, RUN.manifest), "a file that was changed is none of the run's"


class Counted:
    """What passed through throttles, by their rates."""

    def __init__(self, patch):
        self.bytes: Counter[float | None] = Counter()
        take = Throttle.take

        async def counted(throttle, count):
            self.bytes[throttle.rate] += count
            await take(throttle, count)

        patch.setattr(Throttle, "take", counted)


async def test_the_first_fetch_and_what_a_trainer_gives_keep_to_what_is_allowed(tmp_path, monkeypatch):
    """By the bytes that each limit was asked for: all of them."""
    up, down = 2.0e9, 1.0e9
    counted = Counted(monkeypatch)
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        trainer = Node(RUN, TRAINER, swarm.join, allowance=ResourceLimits(up=up))
        nursery.start_soon(lambda: trainer.train(1, records=Records(), early=True))
        async with swarm.join(NEWCOMER) as newcomer:
            with trio.fail_after(100):
                model = await download_run(
                    newcomer, RUN.sealed_manifest, tmp_path, allowance=ResourceLimits(down=down)
                )
        nursery.cancel_scope.cancel()
    fetched = sum(file.stat().st_size for file in model.iterdir())
    assert counted.bytes[down] >= fetched
    assert counted.bytes[up] >= fetched


@pytest.mark.parametrize(
    "name", ["evil.py", "model.safetensors", "weights.bin", "adapter_config.json", "x.part"]
)
async def test_a_manifest_that_names_anything_but_data_is_not_worked_for(name, tmp_path):
    manifest = manifest_with(files=(ModelFile(blob=bytes(32), name=name, size=10),))
    async with MemorySwarm() as swarm, swarm.join(NEWCOMER) as newcomer:
        with pytest.raises(PeerError, match="small files"):
            await download_run(newcomer, manifest, tmp_path)
    assert not list(tmp_path.rglob("*.*"))


async def test_a_layout_that_would_fill_the_disk_is_refused_before_a_byte_is_taken(tmp_path):
    huge = Layout((TensorEntry(dtype="bf16", name="w", shape=(3_000_000_000,)),))
    manifest = manifest_with(layout=blob_id(encode(huge)))
    shelf = BlobRegistry()
    files = {file.blob: (embedded.folder() / file.name).read_bytes() for file in RUN.manifest.model.files}
    shelf.keep(b"all", {**files, blob_id(encode(huge)): encode(huge)})
    async with MemorySwarm() as swarm, swarm.join(TRAINER) as leader, swarm.join(NEWCOMER) as newcomer:
        with BlobServer(leader, shelf).serve(), pytest.raises(ConfigError, match="--max-disk"):
            await download_run(newcomer, manifest, tmp_path, allowance=ResourceLimits(disk=1_000_000_000))
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < 1_000_000


async def test_what_nobody_has_yet_is_asked_for_again_and_said(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    said = []

    def hear(words):
        said.append(words)
        if len(said) == 2:
            asked.cancel()

    async with MemorySwarm() as swarm, swarm.join(NEWCOMER) as newcomer:
        with trio.CancelScope() as asked:
            await download_run(newcomer, RUN.sealed_manifest, tmp_path, on_progress=hear)
    assert ["next try in 1 s" in said[0], "next try in 2 s" in said[1]] == [True, True]
