"""Version 0 from a folder is a shortcut: it must be the run's, or it is left alone; and the layout
from peers.
"""

from __future__ import annotations

import logging

import pytest

from echo_node.errors import PeerError
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.weights.open_store import fetch_layout, layout_in, open_store, read_folder, take_folder
from echo_node.weights.puller import Puller
from protocol import ProtocolError, Rules, blob_id, canonical, encode
from tests.weights.anchor_bytes import write_safetensors
from tests.weights.keys import FOLLOWER, LEADER, RUN, rules_of
from tests.weights.stores import LAYOUT, bits, held, opened, publish, weights
from tests.weights.swarms import offering


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(write_safetensors(weights(0)))
    return folder


def test_a_folder_of_one_file_or_of_several_is_read_as_it_is(model):
    assert bits(read_folder(model)) == bits(weights(0))
    (model / "model.safetensors").unlink()
    names = sorted(weights(0))
    for number, part in enumerate((names[:2], names[2:])):
        data = write_safetensors({name: weights(0)[name] for name in part})
        (model / f"model-{number}.safetensors").write_bytes(data)
    assert bits(read_folder(model)) == bits(weights(0))


async def test_version_zero_from_the_right_folder_costs_no_byte_of_weights(model, tmp_path):
    rules = rules_of(weights(0))
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 1)
        async with (
            MemorySwarm() as swarm,
            offering(swarm.join, store),
            swarm.join(FOLLOWER) as network,
            open_store(tmp_path / "follower", rules, network, model=model) as mine,
        ):
            puller = Puller(network, mine)
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            assert held(mine) == bits(weights(0))
            assert puller.pulls.bytes == 0


@pytest.mark.parametrize(
    "harm", ["other weights", "other names", "cut short", "no file", "a path for a name"]
)
async def test_another_folder_is_left_alone_with_a_word_and_peers_are_asked(model, tmp_path, harm, caplog):
    path = model / "model.safetensors"
    if harm == "other weights":
        path.write_bytes(write_safetensors(weights(1)))
    elif harm == "other names":
        path.write_bytes(write_safetensors({f"x.{name}": one for name, one in weights(0).items()}))
    elif harm == "cut short":
        path.write_bytes(path.read_bytes()[:-5])
    elif harm == "no file":
        path.unlink()
    else:
        path.write_bytes(write_safetensors({f"../../{name}": one for name, one in weights(0).items()}))
    rules = rules_of(weights(0))
    caplog.set_level(logging.WARNING)
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 1)
        async with (
            MemorySwarm() as swarm,
            offering(swarm.join, store),
            swarm.join(FOLLOWER) as network,
            open_store(None, rules, network, model=model) as mine,
        ):
            puller = Puller(network, mine)
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            assert held(mine) == bits(weights(0))
            assert puller.pulls.bytes > 0
    told = [record.message for record in caplog.records if "are left alone" in record.message]
    assert bool(told) == (harm != "no file")


def test_a_folder_that_says_nothing_of_weights_gives_no_layout(tmp_path):
    assert layout_in(tmp_path, bytes(32)) is None
    with opened(tmp_path / "store") as store:
        assert not take_folder(store, tmp_path)


async def test_a_layout_with_names_that_lead_out_of_the_folder_is_refused():
    """Signed into the manifest or not: the type of a layout has no such names."""
    entries = [["../../x", "bf16", [2]]]
    layout = canonical.encode({"tensors": entries})
    rules = Rules(RUN, blob_id(layout), bytes(32), (LEADER.public,), (LEADER.public,))
    async with MemorySwarm() as swarm, swarm.join(LEADER) as leader, swarm.join(FOLLOWER) as follower:
        shelf = BlobRegistry()
        shelf.keep(b"l", {blob_id(layout): layout})
        with BlobServer(leader, shelf).serve(), pytest.raises(ProtocolError, match="a tensor's name"):
            await fetch_layout(follower, rules)


@pytest.mark.usefixtures("autojump_clock")
async def test_a_layout_that_nobody_has_is_said_so():
    rules = rules_of(weights(0))
    async with MemorySwarm() as swarm, swarm.join(FOLLOWER) as network:
        with pytest.raises(PeerError, match="cannot be had"):
            await fetch_layout(network, rules)
    assert blob_id(encode(LAYOUT)) == rules.layout
