"""The bulk port of real nodes: what a large blob travels over, with the port and without."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import trio
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from echo_node.engine.base import TensorBytes
from echo_node.models import embedded
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.bulk_client import NoBulkPortError, read_bulk
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.providers import Want
from echo_node.net.blobs.server import BlobServer
from echo_node.net.libp2p import SwarmSettings, join_swarm
from echo_node.net.rate_limit import UploadLimit
from echo_node.runs.spec import RunSpec, new_run, write_run
from echo_node.weights.publisher import Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of, root_of
from protocol import Roster, Rules, blob_id, derive, encode
from protocol.blob import BulkAsk, Slice, bulk_pass
from tests.net.behaviour import IDENTITIES, until
from tests.net.blob_nodes import MIB, some_bytes
from tests.net.test_bulk import knocked

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LARGE = some_bytes(MIB) * 34
"""More than `DownloadSettings.bulk_from`."""
BLOB = blob_id(LARGE)
LEADER, FOLLOWER, THIRD = IDENTITIES[:3]
assert len(LARGE) > DownloadSettings().bulk_from


@asynccontextmanager
async def nodes(**settings):
    """A node that serves a large blob and one connected to it, joined as `echo-node join` does."""
    registry, uplink = BlobRegistry(), UploadLimit()
    registry.keep(b"all", {BLOB: LARGE})
    async with (
        join_swarm(LEADER, SwarmSettings(listen=(LOOPBACK,), **settings)) as serving,
        join_swarm(FOLLOWER, SwarmSettings(listen=(LOOPBACK,), seeds=(serving.addresses[0],))) as asker,
    ):
        await until(lambda: serving.public in asker.peers() and asker.public in serving.peers())
        with BlobServer(serving, registry, uplink).serve():
            yield serving, asker


async def fetch(asker, serving):
    blobs = BlobClient(asker)
    assert await blobs.fetch([Want(BLOB, len(LARGE))], named=[serving.public]) == {BLOB: LARGE}
    assert blobs.sources.faults() == {}
    return blobs


async def test_a_large_blob_goes_over_the_bulk_port():
    async with nodes() as (serving, asker):
        blobs = await fetch(asker, serving)
        assert blobs.sources.may_have_port(serving.public)
        await until(lambda: serving.counts().get("bulk served"))
        assert serving.counts().get("bulk refused", 0) == 0


async def test_weights_are_pulled_over_the_bulk_port():
    tensor = TensorBytes("bf16", (len(LARGE) // 2,), LARGE)
    layout = layout_of({"layer": tensor})
    rules = Rules(
        derive("run", b"bulk"),
        blob_id(encode(layout)),
        root_of({"layer": tensor}),
        (LEADER.public,),
        (LEADER.public,),
    )
    with WeightsStore.temporary(rules, layout) as mine, WeightsStore.temporary(rules, layout) as theirs:
        Publisher(mine, LEADER, luck=lambda: bytes(32)).publish(
            {"layer": tensor}, step=0, roster=Roster(()), groups=()
        )
        async with (
            join_swarm(LEADER, SwarmSettings(listen=(LOOPBACK,))) as serving,
            WeightsSeeder(serving, mine).serve(),
            join_swarm(FOLLOWER, SwarmSettings(listen=(LOOPBACK,), seeds=(serving.addresses[0],))) as asker,
        ):
            puller = Puller(asker, theirs)
            async with puller.work():
                await until(lambda: serving.public in asker.peers())
                await puller.chain.ask_around([serving.public])
                head = await puller.pull()
            assert head.message.version == 0
            await until(lambda: serving.counts().get("bulk served"))


async def test_a_port_that_is_taken_is_said_once_and_a_stream_serves(caplog):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        caplog.at_level(logging.WARNING, logger="echo_node.net"),
    ):
        async with nodes(bulk_port=taken.getsockname()[1]) as (serving, asker):
            assert serving.bulk is None
            await fetch(asker, serving)
    (warning,) = [each.getMessage() for each in caplog.records if "bulk port" in each.getMessage()]
    assert "Address already in use" in warning
    assert "large blobs go over libp2p streams" in warning


async def test_a_port_behind_a_firewall_is_passed_over_and_a_stream_serves():
    async with nodes() as (serving, asker):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            serving.bulk.port = gone.getsockname()[1]
        blobs = await fetch(asker, serving)
        assert not blobs.sources.may_have_port(serving.public)
        assert serving.counts().get("bulk served", 0) == 0


async def test_the_port_after_the_fixed_one_is_taken_if_it_is_free():
    with socket.create_server(("127.0.0.1", 0)) as free:
        fixed = free.getsockname()[1]
    listen = (f"/ip4/127.0.0.1/tcp/{fixed}",)
    async with join_swarm(LEADER, SwarmSettings(listen=listen)) as network:
        assert network.bulk.port == fixed + 1
    with socket.create_server(("127.0.0.1", fixed + 1)):
        async with join_swarm(LEADER, SwarmSettings(listen=listen)) as network:
            assert network.bulk.port not in (0, fixed + 1)
    async with join_swarm(LEADER, SwarmSettings(listen=listen).for_seed()) as network:
        assert network.bulk is None


async def test_a_relayed_peer_reads_over_the_stream():
    async with (
        join_swarm(THIRD, SwarmSettings(listen=(LOOPBACK,), public=True)) as middle,
        join_swarm(
            LEADER, SwarmSettings(listen=(LOOPBACK,), seeds=(middle.addresses[0],), public=False)
        ) as serving,
        join_swarm(FOLLOWER, SwarmSettings(listen=(), wanted=0)) as asker,
    ):
        registry = BlobRegistry()
        registry.keep(b"all", {BLOB: LARGE})
        await until(lambda: any("p2p-circuit" in each for each in serving.addresses))
        way = f"{middle.addresses[0]}/p2p-circuit/p2p/{serving.host.get_id()}"
        await asker.host.connect(info_from_p2p_addr(Multiaddr(way)))
        await until(lambda: asker.public in serving.peers())
        assert asker.address(serving.public) is None
        with BlobServer(serving, registry).serve():
            assert serving.bulk is not None
            blobs = BlobClient(asker, settings=DownloadSettings(bulk_from=1))
            data = some_bytes(2 * MIB)
            registry.keep(b"more", {blob_id(data): data})
            want = [Want(blob_id(data), len(data))]
            assert await blobs.fetch(want, named=[serving.public]) == {blob_id(data): data}
        assert serving.counts().get("bulk served", 0) == 0


async def test_a_token_of_one_peer_is_worth_nothing_to_another_nor_a_second_time():
    async with nodes() as (serving, asker):
        ask = BulkAsk((Slice(BLOB, 0, 1000),))
        registry = BlobRegistry()
        registry.keep(b"all", {BLOB: LARGE})
        offer = serving.bulk.offer(asker.public, ask, registry, UploadLimit())
        stolen = bulk_pass(offer.token, THIRD.public, ask)
        assert await knocked(serving.bulk, stolen) == b""
        good = bulk_pass(offer.token, asker.public, ask)
        assert await knocked(serving.bulk, good) == LARGE[:1000]
        assert await knocked(serving.bulk, good) == b""


@contextmanager
def started(command):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


async def read_when_served(asker, peer, file):
    """Read a file of the model from a bulk port, once the node has started its role."""
    slices, got = [Slice(blob_id(file), 0, len(file))], bytearray()
    with trio.fail_after(100):
        while not got:
            try:
                await read_bulk(
                    asker,
                    peer,
                    slices,
                    [len(file)],
                    lambda _number, data: got.extend(data),
                    threads=trio.CapacityLimiter(1),
                )
            except NoBulkPortError:  # its engine is being started
                await trio.sleep(0.2)
    return bytes(got)


async def test_a_node_that_a_person_started_serves_at_its_bulk_port(tmp_path):
    spec = RunSpec(name="a test", trainers=[LEADER.peer_id], engines=["torch/f32"])
    write_run(tmp_path / "run", new_run(spec, LEADER))
    command = [sys.executable, "-m", "echo_node", "join", "--role", "sampler", str(tmp_path / "run")]
    places = ("--json", "--state", str(tmp_path / "state"), "--listen", LOOPBACK, "--threads", "1")
    with started([*command, *places]) as process:
        lines = map(json.loads, iter(process.stdout.readline, ""))
        listening = await trio.to_thread.run_sync(
            lambda: next(each for each in lines if each["event"] == "listening")
        )
        assert listening["bulk_port"]
        settings = SwarmSettings(listen=(LOOPBACK,), seeds=(listening["addresses"][0],))
        async with join_swarm(FOLLOWER, settings) as asker:
            await until(asker.peers)
            (peer,) = asker.peers()
            file = (embedded.folder() / "config.json").read_bytes()
            assert await read_when_served(asker, peer, file) == file
