"""A clock that is far from the leader's is told of, once, and with what to do."""

import time

import pytest

from echo_node.election.clock_skew import APART_SECONDS, ClockSkew, in_words
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.net.memory import MemorySwarm
from tests.election.peers import ANN, SAM, VAL, beat_of, head_after, peer, terms

DAY = 86_400.0


async def test_a_node_whose_clock_is_a_day_off_hears_of_it_from_a_heartbeat(tmp_path, caplog):
    async with MemorySwarm() as swarm, peer(swarm, SAM, tmp_path) as sam:
        await sam.chain.take_head(head_after(sam.follower, ANN).sealed)
        leaders = int((time.time() + DAY) * 1000)
        for n in range(3):
            sam.pulse.hear(beat_of(sam.follower, ANN, leaders + n), VAL.public)
    assert caplog.text.count("this machine's clock is 24.0 hours behind the leader's") == 1
    assert "timedatectl" in caplog.text


def test_it_is_said_again_only_after_it_was_right(caplog):
    clocks = ClockSkew(lambda: DAY)
    for seconds in (DAY, DAY - APART_SECONDS, 0.0, 0.0, DAY, DAY + APART_SECONDS, 2 * DAY):
        clocks.hear(int(seconds * 1000))
    assert len(caplog.records) == 2


def test_for_as_long_as_it_lasts_it_can_be_looked_up():
    clocks, seen = ClockSkew(lambda: DAY), []
    for seconds in (DAY, 0.0, 0.0, DAY):
        clocks.hear(int(seconds * 1000))
        seen.append(clocks.apart)
    assert seen == [None, in_words(DAY), in_words(DAY), None]


async def test_who_watches_the_leader_can_say_so(tmp_path):
    async with MemorySwarm() as swarm, peer(swarm, SAM, tmp_path) as sam:
        await sam.chain.take_head(head_after(sam.follower, ANN).sealed)
        watch = LeaderMonitor(sam.network, sam.chain, terms(sam.follower.rules))
        assert watch.clock is None
        watch._heartbeats.hear(beat_of(sam.follower, ANN, int((time.time() + DAY) * 1000)), VAL.public)
        assert "24.0 hours behind" in watch.clock


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (DAY, "24.0 hours ahead of"),
        (-DAY, "24.0 hours behind"),
        (700.0, "12 minutes ahead of"),
        (-10 * DAY, "10.0 days behind"),
    ],
)
def test_it_says_by_how_much(ahead, says):
    assert says in in_words(ahead)
