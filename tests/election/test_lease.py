"""When a leader is taken for alive: by arrivals here, whatever the sender's clock says."""

# ruff: noqa: ARG001 -- asking for the clock is using it

import dataclasses

import trio

from echo_node.election.lease import Lease
from protocol import Follower, TermVote
from tests.election.peers import ANN, BEN, LEASE, VAL, beat_of, granted, head_after, rules


class Chain:
    """A follower that a test changes."""

    def __init__(self):
        self.now = Follower.newcomer(rules())
        self.now = self.now.accept(head_after(self.now, ANN))


async def test_a_node_that_has_just_begun_to_listen_waits_a_whole_lease(autojump_clock):
    lease = Lease(lambda: chain.now, LEASE)
    chain = Chain()
    await trio.sleep(10 * LEASE)
    assert not lease.is_over, "nobody has listened yet"
    lease.begin()
    await trio.sleep(0.9 * LEASE)
    assert not lease.is_over
    assert not lease.is_fresh
    await lease.wait_until_over()
    assert lease.is_over


async def test_a_heartbeat_that_was_heard_before_does_not_count(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE)
    lease.begin()
    first, second = beat_of(chain.now, ANN, 1000), beat_of(chain.now, ANN, 1001)
    assert lease.take(first)
    assert lease.take(second)
    await trio.sleep(0.6 * LEASE)
    for replayed in (first, second, beat_of(chain.now, ANN, 1001, version=7)):
        assert not lease.take(replayed)
    await trio.sleep(0.6 * LEASE)
    assert lease.is_over
    assert not lease.is_fresh
    assert lease.take(beat_of(chain.now, ANN, 1002))
    assert not lease.is_over
    assert lease.is_fresh


async def test_only_the_leader_of_the_current_term_is_heard(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE)
    assert not lease.take(beat_of(chain.now, BEN, 1000))
    assert not lease.take(beat_of(chain.now, ANN, 1000, term=2))
    chain.now = dataclasses.replace(chain.now, revoked=frozenset({ANN.public}))
    assert not lease.take(beat_of(chain.now, ANN, 1000))


async def test_a_new_term_begins_with_a_whole_lease_and_its_leaders_own_clock(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE)
    lease.begin()
    assert lease.take(beat_of(chain.now, ANN, 10**12))
    await lease.wait_until_over()
    vote = TermVote(base=chain.now.tip.id, leader=BEN.public, term=2)
    chain.now = chain.now.grant(granted(vote, BEN, VAL))
    assert not lease.is_over
    assert not lease.is_fresh, "who leads now was not heard yet"
    assert lease.take(beat_of(chain.now, BEN, 5)), "whose clock is far behind"
    await trio.sleep(0.9 * LEASE)
    assert lease.is_fresh


async def test_waiting_ends_with_the_heartbeat_or_with_the_silence(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE)
    lease.begin()
    story = []

    async def sampler():
        await lease.wait_until_fresh()
        story.append("works")
        await lease.wait_until_stale()
        story.append("stops")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler)
        await trio.sleep(LEASE / 2)
        assert story == []
        lease.take(beat_of(chain.now, ANN, 1))
        await trio.sleep(LEASE / 2)
        lease.take(beat_of(chain.now, ANN, 2))
        await trio.sleep(0.9 * LEASE)
        assert story == ["works"]
        await trio.sleep(0.2 * LEASE)
        assert story == ["works", "stops"]
