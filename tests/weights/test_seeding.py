"""Following from version to version, from whoever has it: the cheapest way, with or without the
trainer.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.net.libp2p import join_swarm
from echo_node.net.memory import MemorySwarm
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.weights import seeding as offering_module
from echo_node.weights.publisher import Cadence
from echo_node.weights.route_planner import RoutePlanner
from echo_node.weights.seeding import WeightsSeeder
from protocol import limits, topics
from tests.weights.keys import LEADER, NOBODY, RUN
from tests.weights.stores import OFTEN, bits, held, opened, publish, weights
from tests.weights.swarms import offering, peer, pulling

DELTAS = Cadence(squash_every=8, anchor_share=100.0)
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def memory():
    async with MemorySwarm() as swarm:
        yield swarm.join


@asynccontextmanager
async def loopback():
    """Real nodes: each knows the first one's address."""
    seeds = []

    @asynccontextmanager
    async def join(identity):
        async with join_swarm(identity, SwarmSettings(listen=(LOOPBACK,), seeds=tuple(seeds))) as network:
            if not seeds:
                seeds.extend(network.addresses[:1])
            yield network

    yield join


@pytest.fixture(params=["memory", "loopback"])
def swarm(request):
    return memory if request.param == "memory" else loopback


def brute_force(heads, start: int, target: int, price) -> int:
    """The bytes of the cheapest way between two versions, computed forwards over every route of
    every head.
    """
    versions = {head.id: head.message.version for head in heads}
    cost: dict[int, int] = {}
    for head in heads[: target + 1]:
        ways = [
            (0 if route.base is None else cost[versions[route.base]]) + price(route)
            for route in head.message.routes
        ]
        cost[head.message.version] = 0 if head.message.version == start else min(ways)
    return cost[target]


async def heard(puller, version: int, peers) -> None:
    """Ask until a version was heard of: on a real network peers are met only after a while."""
    while puller.chain.tip is None or puller.chain.tip.message.version < version:
        await puller.chain.ask_around(peers)
        await trio.sleep(0.05)


async def test_whoever_slept_for_a_hundred_versions_catches_up_by_the_cheapest_way(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 200)
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 5, DELTAS)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "sleeper") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            assert puller.held.message.version == 4
            publish(store, 100, DELTAS)
            await puller.chain.ask(LEADER.public)
            here = {blob for blob, _ in puller.store.blobs.all()}
            before, steps = puller.pulls.bytes, puller.pulls.versions
            await puller.pull()
            assert puller.held.message.version == 104
            assert held(puller.store) == bits(weights(104))

            def price(route):
                return sum(
                    store.blobs.size(blob) for blob in store.archive.names_of(route) if blob not in here
                )

            assert puller.pulls.bytes - before == brute_force(store.follower.heads, 4, 104, price)
            assert puller.pulls.versions - steps < 30, "squashes were taken, not a hundred deltas"
            assert puller.store.verify() == []


async def test_whoever_slept_past_what_is_pruned_asks_for_nothing_that_is_gone(tmp_path, monkeypatch):
    """To search for every part of a way that nobody keeps takes longer than the next hundred
    versions.
    """
    cadence = Cadence(squash_every=100, anchor_share=0.9)
    monkeypatch.setattr(
        RoutePlanner, "_cost", lambda _, route: 1_000 if route.base is None else 1
    )  # as in a real model
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 1, cadence)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "sleeper") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            made = publish(store, 12, cadence)
            assert store.prune(versions=2, settled=made[-1].head.id) > 0
            await puller.chain.ask(LEADER.public)
            planned = puller._planner.plan(made[-1].head, ())
            assert any(not store.blobs.has(step.route.table) for step in planned), "the cheapest way is gone"
            searched = []
            find = puller._network.find

            async def noted(key, *more, **options):
                searched.append(key)
                return await find(key, *more, **options)

            monkeypatch.setattr(puller._network, "find", noted)
            await puller.pull()
            assert puller.held == made[-1].head
            assert held(puller.store) == bits(weights(made[-1].head.message.version))
            assert searched == []


async def test_a_version_that_was_overtaken_while_nobody_had_it_is_given_up(tmp_path):
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 1, DELTAS)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "sleeper") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            made = publish(store, 12, DELTAS)
            await puller.chain.ask(LEADER.public)
            puller._blobs.fetch = puller._quick.fetch = _nobody_has_it
            with pytest.raises(PeerError, match="version 2 was overtaken by version 12"):
                await puller.pull(made[1].head.id)
            with pytest.raises(PeerError, match="no way to version 11"):
                await puller.pull(made[10].head.id)
            assert puller.held.message.version == 0


async def _nobody_has_it(*_wants, **_options):
    raise PeerError("nobody has it")


async def test_versions_that_follow_one_another_fast_are_not_all_announced(tmp_path, monkeypatch):
    """Each announcement costs questions to a score of peers; what was let go is withdrawn."""
    monkeypatch.setattr(offering_module, "A_SECOND", 1000.0)
    monkeypatch.setattr(offering_module, "AT_ONCE", 1)
    with opened(tmp_path / "leader", durable=False) as store:
        async with memory() as join, join(LEADER) as network:
            told, withdrawn, last = [], set(), trio.Event()

            async def provide(key, **_options):
                await trio.sleep(0.02)  # longer than it takes to publish some versions
                told.append(key)
                if key == newest:
                    last.set()

            newest = None
            network.provide, network.withdraw = provide, withdrawn.add
            offer = WeightsSeeder(network, store)
            async with offer.serve():
                for _ in range(60):
                    (made,) = publish(store, 1, OFTEN)
                    store.prune(versions=2, settled=made.head.id)
                    newest = topics.blob_key(made.head.message.routes[0].table)
                    for route in reversed(made.head.message.routes):
                        offer.announce_held(route.table)
                    await trio.lowlevel.checkpoint()
                with trio.fail_after(60):
                    await last.wait()
                held_still = {topics.blob_key(blob) for blob, _ in store.blobs.all()}
                assert withdrawn, "what was announced and then let go"
                assert withdrawn <= set(told)
                assert not withdrawn & held_still
                assert len(told) < 60


async def test_announcements_are_paced(tmp_path, mock_clock):
    with opened(tmp_path / "leader", durable=False) as store:
        made = publish(store, 12, DELTAS)
        async with memory() as join, join(LEADER) as network:
            told = []

            async def provide(key, **_options):
                await trio.lowlevel.checkpoint()
                told.append(key)

            network.provide = provide
            offer = WeightsSeeder(network, store)
            async with offer.serve():
                for each in made:
                    offer.announce_held(each.head.message.routes[0].table)
                await trio.testing.wait_all_tasks_blocked()
                assert len(told) == offering_module.AT_ONCE
                assert told[0] == topics.blob_key(made[-1].head.message.routes[0].table), "the newest first"
                mock_clock.jump(1 / offering_module.A_SECOND)
                await trio.testing.wait_all_tasks_blocked()
                assert len(told) == offering_module.AT_ONCE + 1


@pytest.mark.parametrize("part", ["table", "frame", "roster"])
async def test_what_rots_on_a_followers_disk_is_fetched_again(part, tmp_path):
    with opened(tmp_path / "leader", durable=False) as store:
        made = publish(store, 2, DELTAS)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "follower") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull(made[0].head.id)
            head = made[1].head
            (route,) = head.message.routes
            names = [*store.archive.names_of(route)]
            blob = {"table": names[0], "frame": names[1], "roster": head.message.roster}[part]
            (puller.store.blobs.folder / blob.hex()).write_bytes(bytes(store.blobs.size(blob)))
            assert await puller.pull() == head
            assert held(puller.store) == bits(weights(1))
            assert await puller.roster(head) == NOBODY
            assert puller.store.verify() == []


async def test_small_steps_travel_as_deltas(tmp_path):
    with opened(tmp_path / "leader", durable=False) as store:
        publish(store, 1, DELTAS)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "follower") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            for version in range(1, 6):
                (made,) = publish(store, 1, DELTAS)
                (delta,) = made.head.message.routes
                await puller.chain.ask(LEADER.public)
                before = puller.pulls.bytes
                await puller.pull()
                assert held(puller.store) == bits(weights(version))
                assert puller.pulls.bytes - before == delta.size + store.blobs.size(delta.table)


async def test_gossip_alone_leads_from_version_to_version(tmp_path, swarm):
    with opened(tmp_path / "leader", durable=False) as store:
        (first,) = publish(store, 1)
        async with (
            swarm() as join,
            offering(join, store) as leader,
            pulling(join, tmp_path / "follower") as puller,
        ):
            with trio.fail_after(30):
                await puller.chain.wait_for(first.head.id)
            for _ in range(4):
                (made,) = publish(store, 1)
                with trio.fail_after(30):
                    await leader.publish(topics.topic(RUN, topics.HEADS), made.head.sealed)
                    await puller.chain.wait_for(made.head.id)
                    await puller.pull(made.head.id)
            assert held(puller.store) == bits(weights(4))


async def test_a_newcomer_gets_the_newest_version_from_followers_alone(tmp_path, swarm, monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 100)
    async with swarm() as join, AsyncExitStack() as stack:
        meeting_point = await stack.enter_async_context(join(peer(99)))
        followers = [
            await stack.enter_async_context(pulling(join, tmp_path / f"{n}", peer(n + 10))) for n in range(3)
        ]
        with opened(tmp_path / "leader", durable=False) as store:
            made = publish(store, 12)
            async with offering(join, store):
                for number, follower in enumerate(followers):
                    with trio.fail_after(30):
                        await heard(follower, 11, [LEADER.public])
                        if number:  # one comes from nothing to the newest, the others step by step
                            await follower.pull(made[number + 2].head.id)
                        await follower.pull()
        await trio.sleep(0.2)
        assert LEADER.public not in meeting_point.peers(), "the trainer is gone"
        named = [follower._network.public for follower in followers]
        newcomer = await stack.enter_async_context(
            pulling(join, tmp_path / "newcomer", peer(50), named=named)
        )
        with trio.fail_after(60):
            await heard(newcomer, 11, named)
            await newcomer.pull()
        assert newcomer.held == made[11].head
        assert held(newcomer.store) == bits(weights(11))
        assert newcomer.store.verify() == []


async def test_on_the_way_forwards_nothing_older_is_ever_held(tmp_path, monkeypatch):
    """An old anchor on disk costs nothing, so the cheapest way may begin there: it is taken as one
    step.
    """
    from echo_node.weights.store_layout import StoreLayout

    flipped = []
    real = StoreLayout.flip

    def flip(place, head_id):
        flipped.append(head_id)
        real(place, head_id)

    with opened(tmp_path / "leader", durable=False) as store:
        made = publish(store, 9, DELTAS)
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "follower") as puller:
            await puller.chain.ask(LEADER.public)
            for wanted in (0, 1, 2):
                await puller.pull(made[wanted].head.id)
            way = puller._planner.plan(made[8].head, ())
            assert way[0].route.base is None, "from the anchor of version 0, and over the squash"
            monkeypatch.setattr(StoreLayout, "flip", flip)
            await puller.pull()
            assert flipped == [made[8].head.id]
            assert held(puller.store) == bits(weights(8))


async def test_a_newcomer_finds_whoever_announced_a_table_without_being_told(tmp_path):
    async with memory() as join, AsyncExitStack() as stack:
        follower = await stack.enter_async_context(pulling(join, tmp_path / "a", peer(10)))
        with opened(tmp_path / "leader", durable=False) as store:
            made = publish(store, 3)
            async with offering(join, store):
                await follower.chain.ask(LEADER.public)
                await follower.pull()
        newcomer = await stack.enter_async_context(pulling(join, tmp_path / "b", peer(11)))
        await newcomer.chain.ask_around()
        newcomer._network.peers = (
            frozenset  # nobody is connected: only the announcement leads to the follower
        )
        await newcomer.pull()
        assert newcomer.held == made[2].head


async def test_what_was_downloaded_before_a_restart_is_not_fetched_again(tmp_path, monkeypatch):
    from echo_node.weights import puller as pull

    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(pull, "SMALL_BYTES", 0)
    with opened(tmp_path / "leader", durable=False) as store:
        (made,) = publish(store, 1)
        half = list(store.archive.names_of(made.head.message.anchor))
        half = half[: len(half) // 2]
        with opened(tmp_path / "follower") as other:
            for blob in half:
                other.blobs.put(store.blobs.read(blob))
        async with memory() as join, offering(join, store), pulling(join, tmp_path / "follower") as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull()
            whole = made.head.message.anchor.size
            assert puller.pulls.bytes < 0.7 * whole
            assert held(puller.store) == bits(weights(0))
