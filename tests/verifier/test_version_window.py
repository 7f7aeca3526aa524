"""Versions that a verifier pulls: none is skipped that a peer has, and skipped ones are named."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from echo_node.errors import StoreError
from echo_node.net.memory import MemorySwarm
from echo_node.verifier.version_window import pull_window
from echo_node.weights.publisher import Cadence
from tests.weights.chains import LEADER
from tests.weights.stores import bits, opened, publish, weights
from tests.weights.swarms import offering, pulling

SQUASHED = Cadence(squash_every=4, anchor_share=100.0)
"""Every fourth version can be reached in one step from four before, which is the cheapest way."""


@asynccontextmanager
async def behind(tmp_path, *, at, newest):
    """A follower that holds version `at` and has heard of the others."""
    with opened(tmp_path / "leader", durable=False) as leader:
        publish(leader, newest + 1, SQUASHED)
        async with (
            MemorySwarm() as swarm,
            offering(swarm.join, leader),
            pulling(swarm.join, tmp_path / "follower") as puller,
        ):
            await puller.chain.ask(LEADER.public)
            await puller.pull(leader.follower.heads[at].id)
            yield leader, puller


def versions(heads):
    return [head.message.version for head in heads]


async def test_who_is_a_few_versions_behind_jumps_over_none(tmp_path):
    async with behind(tmp_path, at=4, newest=8) as (leader, puller):
        window = leader.follower.heads[-5:]
        assert versions(window) == [4, 5, 6, 7, 8]
        assert versions(await pull_window(puller, window)) == [4, 5, 6, 7, 8]
        assert versions([puller.held]) == [8]
        for head in window:
            state = await puller.use(head, lambda held: bits(held.state))
            assert state == bits(weights(head.message.version))


async def test_a_pull_alone_would_jump(tmp_path):
    """What the test above holds is not so by itself."""
    async with behind(tmp_path, at=4, newest=8) as (leader, puller):
        await puller.pull()
        assert versions(await puller.buildable(leader.follower.heads[-5:])) == [4, 8]
        with pytest.raises(StoreError, match="cannot be built"):
            await puller.use(leader.follower.heads[6], lambda held: held)


async def test_who_is_far_behind_jumps_and_says_what_it_has_missed(tmp_path):
    async with behind(tmp_path, at=4, newest=16) as (leader, puller):
        before = puller.pulls.versions
        assert versions(await pull_window(puller, leader.follower.heads[-4:])) == [16]
        assert versions([puller.held]) == [16]
        assert puller.pulls.versions == before + 1


async def test_a_version_that_nobody_has_any_longer_does_not_keep_it_from_the_newest(tmp_path):
    async with behind(tmp_path, at=4, newest=8) as (leader, puller):
        window = leader.follower.heads[-5:]
        for route in window[1].message.routes:
            leader.blobs.path(route.table).unlink()
        assert versions(await pull_window(puller, window)) == [4, 8]


async def test_what_is_held_is_here_though_a_blob_on_the_way_to_it_is_gone(tmp_path):
    async with behind(tmp_path, at=4, newest=8) as (leader, puller):
        await pull_window(puller, leader.follower.heads[-5:])
        puller.store.blobs.path(leader.follower.heads[0].message.anchor.table).unlink()
        puller.store.archive._whole.clear()
        assert versions(await puller.buildable(leader.follower.heads[-5:])) == [8]


async def test_who_holds_nothing_yet_begins_with_the_newest(tmp_path):
    with opened(tmp_path / "leader", durable=False) as leader:
        publish(leader, 3, SQUASHED)
        async with (
            MemorySwarm() as swarm,
            offering(swarm.join, leader),
            pulling(swarm.join, tmp_path / "follower") as puller,
        ):
            await puller.chain.ask(LEADER.public)
            here = await pull_window(puller, leader.follower.heads)
            assert versions(here)[-1] == 2
            assert versions([puller.held]) == [2]
