"""Heartbeats on the swarm: what counts, what is passed on, and what a follower learns from one."""

# ruff: noqa: ARG001 -- asking for the clock is using it

import time

import pytest
import trio
import trio.testing

from echo_node.election.elector import VoteLog
from echo_node.election.heartbeat import HeartbeatSender
from echo_node.election.heartbeat_times import HeartbeatTimes
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.election.leadership import ASK_SECONDS, DeposedError, Leadership
from echo_node.net.base import ACCEPT, IGNORE, Message, Reject
from echo_node.net.memory import MemorySwarm
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.store import WeightsStore
from protocol import Heartbeat, Identity, TermVote, encode, open_sealed, topics
from protocol.errors import BadSignatureError
from tests.crafting import forged
from tests.election.peers import (
    ANN,
    BEAT,
    BEN,
    LEASE,
    RUN,
    SAM,
    VAL,
    beat_of,
    granted,
    head_after,
    peer,
    rules,
    terms,
)
from tests.weights.stores import LAYOUT

TOPIC = topics.topic(RUN, topics.HEARTBEATS)


async def test_beats_rise_in_time_even_where_the_clock_stands_still(tmp_path, autojump_clock, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 5_000_000)
    async with (
        MemorySwarm() as swarm,
        peer(swarm, ANN, tmp_path) as ann,
        swarm.join(SAM) as spy,
        spy.subscribe(TOPIC, lambda _: ACCEPT) as heard,
        trio.open_nursery() as nursery,
    ):
        head = await ann.publish()
        nursery.start_soon(ann.lead)
        beats = [open_sealed((await heard.receive()).data, Heartbeat, RUN) for _ in range(4)]
        nursery.cancel_scope.cancel()
    assert [beat.message.time_ms for beat in beats] == [5, 6, 7, 8]
    assert {beat.message.head for beat in beats} == {head.id}
    assert {beat.signer for beat in beats} == {ANN.public}


async def test_a_leader_whose_clock_was_set_back_is_heard_again_by_right_clocks(tmp_path, monkeypatch):
    """Its times rise over a restart, and those sent by a wrong clock do not hold it up."""
    async with MemorySwarm() as swarm, peer(swarm, ANN, tmp_path) as ann:
        await ann.publish()
        times = HeartbeatTimes(tmp_path / "heartbeats.json")
        sent = []

        def beat_at(seconds, sender=None):
            monkeypatch.setattr("time.time_ns", lambda: int(seconds * 1e9))
            sender = sender or HeartbeatSender(
                ann.network, ANN, lambda: ann.follower, ann.lease, seconds=BEAT, times=times
            )
            sent.append(sender._message(ann.follower).time_ms)
            return sender

        beat_at(1_000.0)
        beat_at(900.0)
        assert sent == [1_000_000, 1_000_001], "a little back, after a restart"
        wrong = beat_at(90_000.0)
        beat_at(1_010.0, wrong)
        beat_at(1_020.0)
        assert sent[2:] == [90_000_000, 1_010_000, 1_020_000]


async def test_what_is_no_heartbeat_of_the_leader_is_passed_on_to_nobody(tmp_path):
    async with MemorySwarm() as swarm, peer(swarm, SAM, tmp_path) as sam:
        await sam.chain.take_head(head_after(sam.follower, ANN).sealed)
        now = time.time_ns() // 1_000_000

        def judged(beat, signer=ANN, **changes):
            sealed = beat_of(sam.follower, signer, now + beat, **changes).sealed
            return sam.pulse.judge(Message(TOPIC, sealed, VAL.public))

        assert judged(-3_600_000) is IGNORE, "a recording, or a wrong clock: nobody is blamed"
        assert "1.0 hours ahead of the leader's" in sam.pulse.clocks.apart

        assert judged(1000) is ACCEPT
        assert judged(1000, SAM) == Reject("not-trainer")
        assert judged(1000, BEN) is IGNORE, "it may lead a term that its sender knows of"
        assert judged(1000, BEN, term=2) is ACCEPT, "which says that a grant was missed"
        sam.pulse.hear(beat_of(sam.follower, ANN, now + 1000), VAL.public)
        assert judged(1000) is IGNORE
        assert judged(999) is IGNORE
        assert sam.pulse.clocks.apart is None
        assert judged(-3_600_000) is IGNORE
        assert judged(+3_600_000) is IGNORE
        assert sam.pulse.clocks.apart is None, "the leader is heard, so the clock is right"
        with pytest.raises(BadSignatureError):
            sam.pulse.judge(Message(TOPIC, forged(beat_of(sam.follower, ANN, now + 1001).sealed), VAL.public))


async def test_a_heartbeat_that_names_what_was_missed_makes_a_follower_ask(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, peer(swarm, ANN, tmp_path) as ann, peer(swarm, SAM, tmp_path) as sam:
        swarm.partition([SAM.public])
        for _ in range(3):
            last = await ann.publish()
        swarm.heal()
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ann.lead)
            with trio.fail_after(BEAT):
                await sam.reach(lambda now: now.tip is not None and now.tip.id == last.id)
            nursery.cancel_scope.cancel()


async def test_a_follower_that_watches_knows_when_to_stop_and_when_to_go_on(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, peer(swarm, ANN, tmp_path) as ann, swarm.join(SAM) as sam:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            watch = LeaderMonitor(sam, ChainFollower(sam, store), terms(rules()))
            async with watch.work() as lease, trio.open_nursery() as nursery:
                nursery.start_soon(ann.lead)
                await lease.wait_until_fresh()
                swarm.partition([SAM.public])
                await lease.wait_until_stale()
                assert not lease.is_fresh
                swarm.heal()
                await lease.wait_until_fresh()
                nursery.cancel_scope.cancel()


def reign(node, identity: Identity, folder) -> Leadership:
    return Leadership(node.network, identity, node.store, terms(rules()), VoteLog(folder, identity, RUN))


class Bare:
    """A node without anything of its own running."""

    def __init__(self, network, store):
        self.network, self.store = network, store


async def test_a_leader_that_is_replaced_stops_at_once_and_says_by_whom(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, peer(swarm, VAL, tmp_path) as val, swarm.join(ANN) as network:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            store.keep_head(head_after(store.follower, ANN))
            worked = []

            async def lead():
                async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                    await val.lease.wait_until_fresh()
                    worked.append("led")
                    vote = TermVote(base=store.follower.tip.id, leader=BEN.public, term=2)
                    grant = encode(granted(vote, BEN, VAL))
                    await val.network.publish(topics.topic(RUN, topics.GRANTS), grant)
                    await trio.sleep_forever()

            with pytest.raises(DeposedError) as caught:
                await lead()
            assert worked == ["led"]
            assert BEN.peer_id in str(caught.value)
            assert store.follower.leader == BEN.public
            with pytest.raises(DeposedError):
                async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                    worked.append("led on")
            assert worked == ["led"]


async def test_a_leader_that_comes_back_asks_before_it_leads(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, peer(swarm, VAL, tmp_path) as val, swarm.join(ANN) as network:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            head = head_after(store.follower, ANN)
            store.keep_head(head)
            val.store.keep_head(head)
            val.store.keep_grant(granted(TermVote(base=head.id, leader=BEN.public, term=2), BEN, VAL))
            with pytest.raises(DeposedError):
                async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                    pytest.fail("it led")
            assert store.follower == val.follower


async def test_a_leader_that_comes_back_waits_a_little_for_somebody_who_knows(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, swarm.join(ANN) as network, trio.open_nursery() as nursery:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            head = head_after(store.follower, ANN)
            store.keep_head(head)
            led = []

            async def lead():
                try:
                    async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                        led.append(store.follower.term)
                        await trio.sleep_forever()
                except DeposedError:
                    led.append("deposed")

            nursery.start_soon(lead)
            await trio.sleep(ASK_SECONDS / 2)
            assert led == []
            async with peer(swarm, VAL, tmp_path) as val:
                val.store.keep_head(head)
                val.store.keep_grant(granted(TermVote(base=head.id, leader=BEN.public, term=2), BEN, VAL))
                await trio.sleep(ASK_SECONDS)
            assert led == ["deposed"]


async def test_a_leader_whom_nobody_can_tell_anything_leads(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, swarm.join(ANN) as network:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            store.keep_head(head_after(store.follower, ANN))
            async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                assert trio.current_time() >= ASK_SECONDS


async def test_what_else_goes_wrong_under_a_leader_is_not_called_a_change_of_leaders(tmp_path):
    async with MemorySwarm() as swarm, swarm.join(ANN) as network:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            with pytest.raises(ExceptionGroup) as caught:
                async with reign(Bare(network, store), ANN, tmp_path / "votes").hold():
                    raise ValueError("a bug")
            assert caught.value.split(ValueError)[1] is None


async def test_a_leader_that_beats_votes_for_nobody_else(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, peer(swarm, BEN, tmp_path) as ben, swarm.join(ANN) as network:
        with WeightsStore.temporary(rules(), LAYOUT) as store:
            head = head_after(store.follower, ANN)
            store.keep_head(head)
            box = VoteLog(tmp_path / "votes", ANN, RUN)
            async with Leadership(network, ANN, store, terms(rules()), box).hold():
                await trio.sleep(3 * LEASE)
                assert not ben.lease.is_over
                assert not await ben.candidate.stand()
            assert box.voted(2) is None
