"""References to groups: what is fetched, and who rests for what was not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.rollouts.group_refs import AT_ONCE, FETCH_SECONDS, REST_SECONDS, GroupRefFetcher, refer_to
from protocol import Envelope, TrajectoryGroup, blob_id, open_sealed
from tests.crafting import SAMPLERS, identity, open_run, sealed_group
from tests.records import record_of

RUN = open_run()
HEAD = b"h" * 32
ANN, BOB = SAMPLERS[:2]
CROWD = [identity(f"refers to nothing {number}") for number in range(2 * AT_ONCE)]


def reference(sampler, slot=0) -> Envelope:
    made = open_sealed(sealed_group(RUN, HEAD, sampler, slot), TrajectoryGroup, RUN.id)
    return Envelope.parse(refer_to(record_of(made, 0), sampler, RUN.id))


class Blobs:
    """Blobs of those that have them; nobody else ever answers."""

    def __init__(self, *sealed: bytes) -> None:
        self.held = {blob_id(each): each for each in sealed}
        self.asked: list[bytes] = []

    async def fetch(self, wants, *, named, **_bounds):
        self.asked += named
        (want,) = wants
        if want.blob not in self.held:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return {want.blob: self.held[want.blob]}


def fetcher(*sealed) -> GroupRefFetcher:
    made = GroupRefFetcher(SimpleNamespace(bulk=None), RUN.id)
    made._blobs = Blobs(*sealed)
    return made


async def fetch(made, sampler, slot=0):
    return await made.groups_of([reference(sampler, slot)], sampler.public, is_accepted=True)


async def test_keys_that_refer_to_nothing_do_not_keep_everybody_else_waiting(autojump_clock):  # noqa: ARG001 - it jumps
    mine = sealed_group(RUN, HEAD, ANN, 0)
    made = fetcher(mine)
    tried = []

    async def insist(sampler):
        while True:
            tried.append(sampler)
            try:
                await fetch(made, sampler)
            except PeerError:
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for each in CROWD:
            nursery.start_soon(insist, each)
        await trio.sleep(600)
        asked = len(made._blobs.asked)
        late = []
        for _ in range(20):
            begun = trio.current_time()
            (group,) = await fetch(made, ANN)
            assert group.sealed == mine
            late.append(trio.current_time() - begun)
            await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert sum(each > 1 for each in late) <= 4
    assert len(tried) > 1000, "they insist"
    assert asked <= 7 * len(CROWD), "and each holds a place a few times in ten minutes"


async def test_a_sampler_whose_blob_comes_at_last_is_served_again(autojump_clock):  # noqa: ARG001 - it jumps
    made = fetcher()
    for wait in (REST_SECONDS, 2 * REST_SECONDS):
        with pytest.raises(PeerError, match="could not be had"):
            await fetch(made, ANN)
        with pytest.raises(PeerError, match="try again in"):
            await fetch(made, ANN)
        await trio.sleep(wait)
    made._blobs = Blobs(*(sealed_group(RUN, HEAD, ANN, slot) for slot in range(2)))
    for slot in range(2):
        assert len(await fetch(made, ANN, slot)) == 1
    assert not made._rests


async def test_the_blob_of_another_group_counts_as_none(autojump_clock):  # noqa: ARG001 - it jumps
    mine, other = sealed_group(RUN, HEAD, ANN, 0), sealed_group(RUN, HEAD, BOB, 0)
    made = fetcher()
    made._blobs.held[blob_id(mine)] = other
    with pytest.raises(PeerError, match="another group"):
        await fetch(made, ANN)
    with pytest.raises(PeerError, match="try again in"):
        await fetch(made, ANN)


async def test_who_waits_for_a_place_in_vain_has_not_failed(autojump_clock):  # noqa: ARG001 - it jumps
    made = fetcher(sealed_group(RUN, HEAD, ANN, 0))
    async with trio.open_nursery() as nursery:
        for each in CROWD[:AT_ONCE]:
            nursery.start_soon(swallow, made, each)
        await trio.sleep(1)
        begun = trio.current_time()
        assert len(await fetch(made, ANN)) == 1
        assert trio.current_time() - begun < FETCH_SECONDS
    assert ANN.public not in made._rests


async def swallow(made, sampler):
    with pytest.raises(PeerError):
        await fetch(made, sampler)
