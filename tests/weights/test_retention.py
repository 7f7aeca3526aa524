"""A follower's disk: it stays as small as it is, and the last versions can be built whatever came
before.
"""

from __future__ import annotations

import pytest
from trio.testing import wait_all_tasks_blocked

from echo_node.errors import PeerError, StoreError
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.net.memory import MemorySwarm
from echo_node.weights import engine_sync
from echo_node.weights.publisher import Cadence
from echo_node.weights.retention import Retention
from protocol import limits
from tests.weights.keys import LEADER
from tests.weights.stores import bits, follow, hand_over, held, opened, publish, weights
from tests.weights.swarms import QUICK, offering, peer, pulling

KEPT = 4
"""Versions that a follower can build: S + 2 of a run with S = 2."""
DENSE = Cadence(squash_every=4, anchor_share=-1.0)
"""An anchor with every version."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 64)


def size(store) -> int:
    return sum(size for _, size in store.blobs.all())


def can_build(store, version: int) -> bool:
    return store.archive.can_build(store.follower.heads[version].id)


def builds(store, version: int) -> bool:
    """Whether what is built is that version."""
    with store.materialise(store.follower.heads[version].id) as other:
        return bits(other.state) == bits(weights(version))


@pytest.mark.parametrize("cadence", [Cadence(squash_every=4, anchor_share=2.0), DENSE])
def test_a_follower_of_many_versions_takes_no_more_room_and_builds_the_last_ones(tmp_path, cadence):
    versions = 50
    with opened(tmp_path / "leader", durable=False) as leader:
        publish(leader, versions, cadence)
        assert sum(head.message.anchor is not None for head in leader.follower.heads) > 4
        sizes = []
        with opened(tmp_path / "follower", durable=False) as store:
            settling = Retention(store, KEPT)
            for version in range(versions):
                follow(leader, store, version)
                settling.settle()
                sizes.append(size(store))
                assert all(can_build(store, each) for each in range(max(0, version - KEPT + 1), version + 1))
            assert store.verify() == []
        assert max(sizes) < size(leader) / 2
        assert max(sizes[25:]) <= 1.1 * max(sizes[:25])
        with opened(tmp_path / "follower", durable=False) as store:
            assert held(store) == bits(weights(versions - 1))
            publish(leader, 1, cadence)
            follow(leader, store, versions)
            Retention(store, KEPT).settle()
            assert store.verify() == []
            assert all(builds(store, each) for each in range(versions - KEPT + 1, versions + 1))


def test_an_anchor_that_a_follower_writes_is_the_one_that_was_signed(tmp_path):
    with (
        opened(tmp_path / "leader", durable=False) as leader,
        opened(tmp_path / "follower", durable=False) as store,
    ):
        publish(leader, 40)
        for version in range(40):
            follow(leader, store, version)
            Retention(store, KEPT).settle()
        whole = [
            head.message.anchor
            for head in store.follower.heads[1:]
            if head.message.anchor and store.archive.is_whole(head.message.anchor)
        ]
        assert whole
        for route in whole:
            for blob in store.archive.names_of(route):
                assert store.blobs.read(blob) == leader.blobs.read(blob)


def test_an_anchor_that_was_jumped_over_is_no_place_to_cut(tmp_path):
    """A squash may start before the anchor that was written last, and lead beyond it."""
    rarely = Cadence(squash_every=8, anchor_share=100.0)
    with (
        opened(tmp_path / "leader", durable=False) as leader,
        opened(tmp_path / "follower", durable=False) as store,
    ):
        publish(leader, 10, rarely)
        publish(leader, 1, DENSE)
        made = [each.head for each in publish(leader, 20, rarely)]
        settling = Retention(store, KEPT)
        for version in range(11):
            follow(leader, store, version)
            assert settling.settle() == 0
        assert store.archive.is_whole(store.tip.message.anchor)
        squashed = made[5]
        assert [route.base for route in squashed.message.routes][1] == store.follower.heads[8].id
        for head in made[:6]:
            store.keep_head(head)
        hand_over(leader, store, squashed.message.routes[1])
        store.walk(store.archive.way(squashed.id))
        assert settling.settle() == 0
        assert can_build(store, 16)
        for version in range(17, 30):
            follow(leader, store, version)
            settling.settle()
            assert can_build(store, version)
        assert store.verify() == []


def test_an_anchor_that_is_cut_in_another_way_is_left_alone(tmp_path, monkeypatch):
    """Another program may write an anchor in other pieces: it proves the same state, and cannot be
    made here.
    """
    from echo_node.weights.flat_layout import FlatLayout

    real = FlatLayout.anchor_cuts

    def uneven(flat):
        first, second, *rest = real(flat)
        return [first, second + 1, *rest]

    with (
        opened(tmp_path / "leader", durable=False) as leader,
        opened(tmp_path / "follower", durable=False) as store,
    ):
        publish(leader, 1, DENSE)
        monkeypatch.setattr(FlatLayout, "anchor_cuts", uneven)
        publish(leader, 9, DENSE)
        monkeypatch.setattr(FlatLayout, "anchor_cuts", real)
        settling = Retention(store, KEPT)
        follow(leader, store, 0)
        for version in range(1, 10):
            for head in leader.follower.heads[: version + 1]:
                store.keep_head(head)
            head = leader.follower.heads[version]
            (delta,) = (route for route in head.message.routes if route.base == head.message.previous)
            for blob in leader.archive.names_of(delta):
                store.blobs.put(leader.blobs.read(blob))
            store.advance(head, delta)
            before = size(store)
            assert settling.settle() == 0
            assert size(store) == before, "nothing was written for nothing"
        assert all(builds(store, each) for each in range(10))


async def test_a_puller_lets_old_versions_go_by_itself_and_refuses_them_to_others(tmp_path):
    with opened(tmp_path / "leader", durable=False) as leader:
        publish(leader, 1)
        async with (
            MemorySwarm() as swarm,
            offering(swarm.join, leader),
            pulling(swarm.join, tmp_path / "follower", versions=KEPT) as puller,
            swarm.join(peer(30)) as other,
        ):
            for _ in range(40):
                publish(leader, 1)
                await puller.chain.ask(LEADER.public)
                await puller.pull()
            await wait_all_tasks_blocked()
            async with puller._one:  # until what follows the last version is done
                assert size(puller.store) < size(leader) / 2
            head = leader.follower.heads[1]
            gone = head.message.routes[0].table
            assert not puller.store.blobs.has(gone)
            here = puller._network.public
            with pytest.raises(PeerError):
                await BlobClient(other, settings=QUICK).fetch([Want(gone, most=10_000)], named=[here])
            newest = puller.held.message.routes[0].table
            await BlobClient(other, settings=QUICK).fetch([Want(newest, most=10_000)], named=[here])
            assert all(builds(puller.store, each) for each in range(41 - KEPT, 41))
            assert puller.store.verify() == []


def test_what_is_lent_stays_whatever_goes(tmp_path):
    with (
        opened(tmp_path / "leader", durable=False) as leader,
        opened(tmp_path / "follower", durable=False) as store,
    ):
        publish(leader, 40)
        lent = store.lent.put(b"a long group")
        freed = 0
        for version in range(40):
            follow(leader, store, version)
            freed += Retention(store, KEPT).settle()
        assert freed
        assert store.lent.read(lent) == b"a long group"


def test_an_engine_that_is_behind_what_was_let_go_gets_its_weights_afresh(tmp_path):
    """The changes since its version may go while they are being read."""

    class Behind:
        loaded = b"o" * 32

        def patch(self, _update):
            raise StoreError("a frame is gone")

        def load(self, head_id, state):
            self.loaded, self.state = head_id, bits(state)

    engine = Behind()
    with opened(tmp_path / "store", durable=False) as store:
        publish(store, 2)
        with store.lease() as lease:
            engine_sync.hand_over(lease, engine)
        assert engine.loaded == store.tip.id
    assert engine.state == bits(weights(1))


def test_a_table_that_goes_while_changes_are_read_is_an_error_of_the_store(tmp_path):
    """Whoever puts weights into an engine then takes all of them; see `hand_over`."""
    with opened(tmp_path / "store", durable=False) as store:
        made = publish(store, 3)
        with store.lease() as lease:
            assert sum(change.positions.size for change in lease.changes(made[0].head.id))
            for route in store.tip.message.routes:
                store.blobs.path(route.table).unlink()
            with pytest.raises(StoreError, match="gone"):
                list(lease.changes(made[0].head.id))
