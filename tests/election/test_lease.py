"""When a leader is taken for alive: by arrivals here of what is new and near the clock."""

# ruff: noqa: ARG001 -- asking for the clock is using it

import dataclasses
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo_node.election.clock_skew import APART_SECONDS
from echo_node.election.heartbeat_times import TERMS, HeartbeatTimes
from echo_node.election.lease import Lease
from protocol import Follower, TermVote
from tests.election.peers import ANN, BEN, LEASE, VAL, beat_of, granted, head_after, rules


def clock():
    return 1.0


class Chain:
    """A follower that a test changes."""

    def __init__(self):
        self.now = Follower.newcomer(rules())
        self.now = self.now.accept(head_after(self.now, ANN))


async def test_a_node_that_has_just_begun_to_listen_waits_a_whole_lease(autojump_clock):
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
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
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
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
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
    assert not lease.take(beat_of(chain.now, BEN, 1000))
    assert not lease.take(beat_of(chain.now, ANN, 1000, term=2))
    chain.now = dataclasses.replace(chain.now, revoked=frozenset({ANN.public}))
    assert not lease.take(beat_of(chain.now, ANN, 1000))


async def test_a_new_term_begins_with_a_whole_lease_and_its_leaders_own_clock(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
    lease.begin()
    assert lease.take(beat_of(chain.now, ANN, 90_000))
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
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
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


async def test_a_lease_is_fresh_to_its_last_moment(autojump_clock):
    chain = Chain()
    lease = Lease(lambda: chain.now, LEASE, clock=clock)
    lease.begin()
    assert not lease.is_fresh
    lease.take(beat_of(chain.now, ANN, 1))
    await trio.sleep(0.999 * LEASE)
    assert lease.is_fresh
    assert lease.fresh_seconds == pytest.approx(0.001 * LEASE)
    await trio.sleep(0.001 * LEASE)
    assert not lease.is_fresh


# Recordings


async def test_a_node_that_restarted_is_not_fooled_by_a_recording(autojump_clock, tmp_path):
    """A whole hour of a dead leader's heartbeats, played to a node that heard them before."""
    chain, wall = Chain(), [5_000_000.0]
    file = tmp_path / "node" / "heartbeats.json"

    def started():
        times = HeartbeatTimes(file)
        return Lease(lambda: chain.now, LEASE, times=times, clock=lambda: wall[0])

    before = started()
    recorded = [beat_of(chain.now, ANN, int(1000 * wall[0]) + 1000 * n) for n in range(300)]
    assert all(before.take(beat) for beat in recorded)
    after = started()
    after.begin()
    assert not any(after.take(beat) for beat in recorded)
    assert not after.is_fresh
    assert after.take(beat_of(chain.now, ANN, int(1000 * wall[0]) + 300_000))
    wall[0] += 30 * 86_400
    assert not any(started().take(beat) for beat in recorded)


async def test_a_recording_fools_no_newcomer_of_the_run_either(autojump_clock):
    chain = Chain()
    now = 30 * 86_400.0
    lease = Lease(lambda: chain.now, LEASE, clock=lambda: now)
    lease.begin()
    for seconds in range(0, 3600, 15):
        assert not lease.take(beat_of(chain.now, ANN, 1000 * seconds))
        await trio.sleep(LEASE / 4)
    assert lease.is_over
    assert not lease.take(beat_of(chain.now, ANN, int(1000 * (now + APART_SECONDS + 1)))), "from the future"
    assert lease.take(beat_of(chain.now, ANN, int(1000 * (now - APART_SECONDS + 1))))


@given(
    beats=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10**14)), max_size=60),
    restarts=st.sets(st.integers(0, 59)),
)
def test_the_highest_time_of_a_term_never_falls_whatever_comes_and_goes(beats, restarts):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "heartbeats.json"
        times, highest = HeartbeatTimes(file), {}
        for number, (term, time_ms) in enumerate(beats):
            times.heard(term, time_ms)
            highest[term] = max(time_ms, highest.get(term, -1))
            if number in restarts:
                times = HeartbeatTimes(file)
        newest = sorted(highest)[-TERMS:]
        assert [times.highest(term) for term in newest] == [highest[term] for term in newest]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b'{"1": {}}', b"\xff", b"1" * 9999])
def test_a_damaged_file_of_times_is_written_anew(content, tmp_path, caplog):
    file = tmp_path / "heartbeats.json"
    file.write_bytes(content)
    times = HeartbeatTimes(file)
    assert times.highest(1) == -1
    assert "damaged" in caplog.text
    times.heard(1, 5)
    assert HeartbeatTimes(file).highest(1) == 5


def test_a_disk_that_takes_no_times_does_not_silence_the_leader(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    times = HeartbeatTimes(tmp_path / "file" / "heartbeats.json")
    times.heard(1, 5)
    assert times.highest(1) == 5
    assert "not written" in caplog.text
