"""Node process of the broadcast benchmark: JSON commands on stdin, replies on stdout.

The network is joined and the weights are pulled and served as in `echo-node join`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import trio

from echo_node.engine.base import TensorBytes
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.providers import Want
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.rate_limit import UploadLimit
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.weights.publisher import Cadence, Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of, root_of
from protocol import Identity, Roster, Rules, blob_id, derive, encode, topics

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TENSOR_MB = 20
RUN = derive("run", b"broadcast")
TRAINER = Identity(derive("key", b"trainer"))


def model(megabytes: int) -> dict[str, TensorBytes]:
    """Return version 0: incompressible, and the same in every process."""
    luck = np.random.default_rng(0)
    count = max(1, megabytes // TENSOR_MB)
    each = megabytes * 1_000_000 // count // 2
    return {f"layer.{n:03}": TensorBytes("bf16", (each,), luck.bytes(2 * each)) for n in range(count)}


def changed(state: dict[str, TensorBytes], share: float) -> dict[str, TensorBytes]:
    """Change a share of the elements by one unit in the last place."""
    luck = np.random.default_rng(1)
    made = {}
    for name, tensor in state.items():
        values = np.frombuffer(tensor.data, "<u2").copy()
        values[luck.random(values.size, np.float32) < share] ^= 1
        made[name] = TensorBytes(tensor.dtype, tensor.shape, values.tobytes())
    return made


class Node:
    """Follower or trainer of the benchmark; each public method is a command."""

    def __init__(
        self, settings: dict[str, Any], network: Libp2pNetwork, store: WeightsStore, puller: Puller
    ) -> None:
        self._settings = settings
        self._network = network
        self._store = store
        self._puller = puller
        self._state: dict[str, TensorBytes] = {}
        self._publisher = Publisher(
            store, TRAINER, luck=lambda: bytes(32), cadence=Cadence(anchor_share=100.0)
        )

    async def meet(self, peers: list[str]) -> dict[str, Any]:
        """Wait until most of the others are connected."""
        wanted = {bytes.fromhex(peer) for peer in peers} - {self._network.public}
        with trio.move_on_after(15):
            while len(wanted & self._network.peers()) < len(wanted):  # noqa: ASYNC110 -- they come by themselves
                await trio.sleep(0.1)
        return {"peers": len(wanted & self._network.peers())}

    async def publish(self, change: float, *, gossip: bool = True) -> dict[str, Any]:
        def make() -> int:
            first = not self._state
            self._state = model(self._settings["megabytes"]) if first else changed(self._state, change)
            version = 0 if first else 1
            made = self._publisher.publish(self._state, step=version, roster=Roster(()), groups=())
            return made.head.message.routes[0].size

        size = await trio.to_thread.run_sync(make)
        if gossip:
            await self.gossip()
        return {"delta_bytes": size}

    async def gossip(self) -> dict[str, Any]:
        tip = self._store.follower.tip
        assert tip is not None
        await self._network.publish(topics.topic(RUN, topics.HEADS), tip.sealed)
        return {}

    async def pull(self, version: int) -> dict[str, Any]:
        began = time.monotonic()
        while (tip := self._puller.chain.tip) is None or tip.message.version < version:
            with trio.move_on_after(0.5):
                await self._puller.chain.wait_for_newer(tip.id if tip else None)
                continue
            await self._puller.chain.ask_around()
        await self._puller.pull()
        return {"seconds": time.monotonic() - began}

    async def fetch_from_trainer(self) -> dict[str, Any]:
        """Fetch the same anchor again, from the trainer alone."""
        first = self._store.follower.heads[0]
        anchor = first.message.anchor
        assert anchor is not None
        table = self._store.archive.names_of(anchor)
        wants = [Want(blob, self._store.blobs.size(blob)) for blob in table]
        blobs = BlobClient(self._network, settings=DownloadSettings(sources=1))
        folder = Path(self._settings["folder"], "again")
        await blobs.fetch_to(
            folder, wants, named=[TRAINER.public], under=[b"nobody announces this......here."]
        )
        return {}


def identity(number: int) -> Identity:
    return TRAINER if number == 0 else Identity(derive("key", bytes([number])))


async def run(settings: dict[str, Any]) -> None:
    first = model(settings["megabytes"])
    layout = layout_of(first)
    rules = Rules(RUN, blob_id(encode(layout)), root_of(first), (TRAINER.public,), (TRAINER.public,))
    del first
    swarm = SwarmSettings(listen=(LOOPBACK,), seeds=tuple(settings["seeds"]))
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(join_swarm(identity(settings["number"]), swarm))
        store = stack.enter_context(WeightsStore.open(Path(settings["folder"]), rules, layout))
        uplink = UploadLimit(total=settings["uplink"])
        puller = Puller(network, store, uplink=uplink)
        await stack.enter_async_context(puller.work())
        node = Node(settings, network, store, puller)
        say({"public": network.public.hex(), "addresses": network.addresses})
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            order = json.loads(line)
            say(await getattr(node, order.pop("do"))(**order))


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(run, json.loads(sys.argv[1]))
