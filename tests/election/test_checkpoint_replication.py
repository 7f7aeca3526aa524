"""Checkpoints that travel to whoever stands by: whole, named by the leader, and no more than there
should be.
"""

# ruff: noqa: ARG001 -- asking for the clock is using it

import dataclasses
from contextlib import asynccontextmanager

import pytest
import trio

from echo_node.election.checkpoint_replication import LENT, CheckpointFetcher, CheckpointServer, Replica
from echo_node.errors import PeerError
from echo_node.net.memory import MemorySwarm
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from protocol import blob_id
from tests.election.peers import ANN, BEN, beat_of, rules
from tests.weights.stores import LAYOUT


def written(folder, name, size=5000):
    path = folder / name
    path.write_bytes(name.encode() * (size // len(name)))
    return path


@asynccontextmanager
async def pair(tmp_path, keep, most=1 << 20):
    """A leader that lends, and a trainer that stands by."""
    async with MemorySwarm() as swarm, swarm.join(ANN) as ann, swarm.join(BEN) as ben:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            lending = CheckpointServer(store)
            borrowing = CheckpointFetcher(ben, tmp_path / "borrowed", keep, most=most)
            async with WeightsSeeder(ann, store).serve(), trio.open_nursery() as nursery:
                nursery.start_soon(borrowing.follow)
                yield store, lending, borrowing
                nursery.cancel_scope.cancel()


async def until(condition):
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread
            await trio.sleep(0.1)


async def test_what_the_leader_lends_is_kept_and_lent_again_when_it_changes(tmp_path, autojump_clock):
    kept = []
    async with pair(tmp_path, lambda path: kept.append(path.read_bytes())) as (store, lending, borrowing):
        assert lending.ext() == {}
        for number in range(4):
            path = written(tmp_path, f"checkpoint {number} ")
            data = path.read_bytes()
            replica = lending.lend(path, number)
            path.unlink()  # as its owner does with old ones
            assert replica == Replica(blob_id(data), len(data), number)
            beat = beat_of(store.follower, ANN, 1000 + number, ext=lending.ext())
            assert Replica.of(beat.message) == replica
            borrowing.hear(beat)
            await until(lambda replica=replica: borrowing.kept == replica)
            assert kept[-1] == data
            borrowing.hear(beat)
        assert len(kept) == 4, "nothing is fetched twice"
        assert len(list(store.lent.folder.iterdir())) == LENT
        assert list((tmp_path / "borrowed").iterdir()) == []


async def test_a_checkpoint_that_is_none_is_not_fetched_again(tmp_path, autojump_clock):
    tried = []

    def refuse(path):
        tried.append(path)
        raise PeerError("no checkpoint")

    async with pair(tmp_path, refuse) as (store, lending, borrowing):
        lending.lend(written(tmp_path, "bad "), 1)
        for time in range(3):
            borrowing.hear(beat_of(store.follower, ANN, time, ext=lending.ext()))
            await trio.sleep(30)
        assert len(tried) == 1
        assert list((tmp_path / "borrowed").iterdir()) == []


async def test_one_that_cannot_be_had_is_tried_again_and_does_not_stand_in_the_way(tmp_path, autojump_clock):
    kept = []
    async with pair(tmp_path, lambda path: kept.append(path.read_bytes())) as (store, lending, borrowing):
        gone = lending.lend(written(tmp_path, "gone "), 1)
        (store.lent.folder / gone.blob.hex()).unlink()
        borrowing.hear(beat_of(store.follower, ANN, 1, ext=lending.ext()))
        await trio.sleep(30)
        assert kept == []
        lending.lend(written(tmp_path, "here "), 2)
        borrowing.hear(beat_of(store.follower, ANN, 2, ext=lending.ext()))
        await until(lambda: kept)
        assert borrowing.kept.step == 2


async def test_more_than_a_checkpoint_can_have_is_not_wanted(tmp_path, autojump_clock):
    async with pair(tmp_path, pytest.fail, most=100) as (store, lending, borrowing):
        lending.lend(written(tmp_path, "large "), 1)
        borrowing.hear(beat_of(store.follower, ANN, 1, ext=lending.ext()))
        await trio.sleep(30)
        assert borrowing.kept is None


GOOD = Replica(bytes(32), 1, 0)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"checkpoint": 1},
        {"checkpoint": {}},
        {"checkpoint": {"blob": b"short", "size": 1, "step": 0}},
        {"checkpoint": {"blob": "x" * 32, "size": 1, "step": 0}},
        {"checkpoint": {"blob": bytes(32), "size": 0, "step": 0}},
        {"checkpoint": {"blob": bytes(32), "size": 1 << 60, "step": 0}},
        {"checkpoint": {"blob": bytes(32), "size": True, "step": 0}},
        {"checkpoint": {"blob": bytes(32), "size": 1.0, "step": 0}},
        {"checkpoint": {"blob": bytes(32), "size": 1, "step": -1}},
        {"checkpoint": {"blob": bytes(32), "size": 1, "step": 0, "more": 1}},
    ],
)
def test_a_note_that_is_none_is_passed_over(told):
    from protocol import Follower

    beat = beat_of(Follower.newcomer(rules()), ANN, 1)
    assert Replica.of(dataclasses.replace(beat.message, ext=told)) is None
    assert Replica.of(dataclasses.replace(beat.message, ext=GOOD.as_ext())) == GOOD
