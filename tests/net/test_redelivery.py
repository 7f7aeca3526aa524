"""Redelivery: every item arrives once, under network faults and restarts of either side."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import math
import random

import pytest
import trio
import trio.testing

from echo_node.errors import DefectError, PeerError, StoreError
from echo_node.net import memory_node
from echo_node.net.base import SenderMuted
from echo_node.net.link_faults import LinkFaults
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox import outbox as outbox_room
from echo_node.net.outbox.backoff import Patience, Schedule
from echo_node.net.outbox.direct_delivery import Taker, serve_deliveries
from echo_node.storage import sqlite
from protocol import topics
from protocol.errors import TooLargeError
from tests.net.behaviour import IDENTITIES
from tests.net.delivery_fixtures import GROUPS, Receiver, Sender, accept, ids, item, items, unpack

ONE, TWO, THREE, *_ = IDENTITIES
STORM = {"loss": 0.5, "delay": (0.01, 0.4), "duplicate": 0.3, "reorder": 0.3}


@pytest.fixture(autouse=True)
def disk_at_once(monkeypatch):
    """The clock of these tests jumps whenever every task waits, and would not wait for a thread."""

    async def at_once(work):
        await trio.lowlevel.checkpoint()
        return work()

    monkeypatch.setattr(sqlite, "in_thread", at_once)


def each_once(handed, count):
    assert len(handed) == len(set(handed)), "each once"
    assert set(handed) == set(ids(items(count))), "all of them"


async def test_in_fair_weather_gossip_is_enough_and_carries_many_in_one(autojump_clock, tmp_path):
    async with (
        MemorySwarm() as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(500))
        await sender.emptied()
        await trio.sleep(600)
        each_once(receiver.handed, 500)
        assert receiver.asked == {"gossip": math.ceil(500 * 205 / 65_000)}


async def test_items_that_come_one_by_one_are_gathered(autojump_clock, tmp_path):
    async with (
        MemorySwarm() as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        for each in items(50):
            await sender.outbox.put([each])
        await sender.emptied()
        each_once(receiver.handed, 50)
        assert receiver.asked["gossip"] == 1


async def test_items_that_come_one_by_one_are_gathered_for_delivery_by_hand_too(autojump_clock, tmp_path):
    async with (
        MemorySwarm(loss=1.0) as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        for each in items(50):
            await sender.outbox.put([each])
            await trio.sleep(0.002)
        await sender.emptied()
        each_once(receiver.handed, 50)
        assert receiver.asked["by hand"] <= 3


async def test_when_gossip_is_lost_the_items_go_by_hand_together(autojump_clock, tmp_path):
    async with (
        MemorySwarm(loss=1.0) as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(500))
        await trio.sleep(sender.patience.moment - 0.1)
        assert receiver.asked == {}, "gossip has its moment first"
        await sender.emptied()
        each_once(receiver.handed, 500)
        assert receiver.asked == {"by hand": 2}
        assert trio.current_time() < 5


async def test_where_answers_are_empty_receipts_come_by_gossip_however_often_they_are_lost(
    autojump_clock, tmp_path
):
    async with (
        MemorySwarm(seed=3, loss=0.8) as swarm,
        Receiver(swarm, TWO, tmp_path / "in", answers=False).life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(100))
        await sender.emptied()
        each_once(receiver.handed, 100)
        assert receiver.asked["by hand"] > 1


async def storm(seed, folder):
    """Put, cut, restart both sides and heal, by the seed; at the end everything is there once."""
    luck = random.Random(seed)
    async with MemorySwarm(seed, **STORM) as swarm:
        receiver = Receiver(swarm, TWO, folder / "in", answers=seed % 2 == 0)
        sender = Sender(swarm, ONE, folder / "out", TWO.public, seed=seed)
        done = trio.Event()

        async def live_and_die(who):
            while not done.is_set():
                async with who.life():
                    with trio.move_on_after(luck.uniform(0.2, 12)):
                        await done.wait()
                await trio.sleep(luck.uniform(0, 5))

        async def weather():
            while not done.is_set():
                await trio.sleep(luck.uniform(1, 20))
                swarm.partition([ONE.public], [TWO.public])
                await trio.sleep(luck.uniform(1, 20))
                swarm.heal()

        async def produce():
            for n in range(0, 300, 10):
                while True:  # whoever produces must try again when its own node dies under it
                    try:
                        await sender.outbox.put(items(300)[n : n + 10])
                        break
                    except StoreError:
                        await trio.sleep(0.5)
                await trio.sleep(luck.uniform(0, 3))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live_and_die, receiver)
            nursery.start_soon(live_and_die, sender)
            nursery.start_soon(weather)
            await trio.sleep(0.1)
            await produce()
            with trio.fail_after(24 * 3600):
                while sender.outbox.pending:  # noqa: ASYNC110 -- the outbox is another one in each life
                    await trio.sleep(1)
            done.set()
        async with receiver.life():
            each_once(receiver.handed, 300)
            each_once(receiver.waiting(), 300)
        assert receiver.lives > 2


@pytest.mark.parametrize("seed", range(4))
async def test_in_a_storm_with_restarts_and_cuts_every_item_arrives_once(autojump_clock, tmp_path, seed):
    await storm(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 100))
async def test_in_a_hundred_storms_every_item_arrives_once(autojump_clock, tmp_path, seed):
    await storm(seed, tmp_path)


async def test_a_burst_of_500_survives_a_receiver_that_restarts_in_the_middle(autojump_clock, tmp_path):
    async with MemorySwarm(seed=1, **STORM) as swarm:
        receiver = Receiver(swarm, TWO, tmp_path / "in")
        async with Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender:
            async with receiver.life():
                await sender.outbox.put(items(500, size=1000))
                await receiver.some.wait()
            handed = len(receiver.handed)
            assert 0 < handed < 500, "it died with some and without others"
            await trio.sleep(100)
            async with receiver.life():
                assert len(receiver.waiting()) == handed, "what it had taken is there when it comes back"
                back = trio.current_time()
                await sender.emptied()
                assert trio.current_time() - back < 10, (
                    "its return is noticed, whatever the pause had grown to"
                )
                each_once(receiver.handed, 500)
                each_once(receiver.waiting(), 500)


async def test_a_sender_that_restarts_goes_on_with_what_was_not_acknowledged(autojump_clock, tmp_path):
    async with MemorySwarm() as swarm:
        sender = Sender(swarm, ONE, tmp_path / "out", TWO.public)
        async with sender.life():
            await sender.outbox.put(items(20))
            await trio.sleep(30)
        async with Receiver(swarm, TWO, tmp_path / "in").life() as receiver:
            await trio.sleep(30)
            assert receiver.handed == []
            async with sender.life():
                await sender.emptied()
            each_once(receiver.handed, 20)


async def test_a_cut_that_heals_is_noticed_without_waiting_for_the_longest_pause(autojump_clock, tmp_path):
    async with (
        MemorySwarm() as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        swarm.partition([ONE.public])
        await sender.outbox.put(items(20))
        await trio.sleep(3600)
        assert sender.outbox.pending == 20
        assert sender.network.counts()["asked"] < 3600 / sender.patience.cap * 4, "it was not hammered"
        swarm.heal()
        await trio.sleep(sender.patience.moment + 0.1)
        assert sender.outbox.pending == 0
        each_once(receiver.handed, 20)


async def test_a_peer_without_a_handler_is_tried_until_it_has_one(autojump_clock, tmp_path):
    """It never leaves the network, so nothing but the pauses says when to try again."""
    async with (
        MemorySwarm(loss=1.0) as swarm,
        swarm.join(TWO) as two,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(20))
        await trio.sleep(3600)
        asked = sender.network.counts()["asked"]
        assert 3600 / sender.patience.cap < asked < 4 * 3600 / sender.patience.cap
        handed = []

        async def take(message):
            await trio.lowlevel.checkpoint()
            handed.extend(ids(unpack(message.data)))
            return b"".join(ids(unpack(message.data)))

        with serve_deliveries(two, {GROUPS: Taker(accept, take)}):
            await trio.sleep(sender.patience.cap + 1)
            assert sender.outbox.pending == 0
        each_once(handed, 20)


async def test_a_busy_peer_is_left_alone_and_gets_its_items_later(autojump_clock, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_node, "HANDLERS", 0)
    async with (
        MemorySwarm(loss=1.0) as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(20))
        await trio.sleep(600)
        assert sender.outbox.pending == 20
        assert sender.network.counts()["asked"] < 60
        monkeypatch.setattr(memory_node, "HANDLERS", 64)
        await sender.emptied()
        each_once(receiver.handed, 20)


async def test_a_peer_that_never_answers_holds_up_nobody(autojump_clock, tmp_path):
    async def hang(_message):
        await trio.sleep_forever()

    async with (
        MemorySwarm(loss=1.0) as swarm,
        swarm.join(THREE) as three,
        Receiver(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", THREE.public, TWO.public).life() as sender,
    ):
        with serve_deliveries(three, {GROUPS: Taker(accept, hang)}):
            for n in range(10):
                await sender.outbox.put(items(50)[5 * n : 5 * n + 5])
                await trio.sleep(0.5)
            await sender.emptied()
            assert trio.current_time() < 5 + 2 * sender.patience.moment
            each_once(receiver.handed, 50)


@pytest.mark.parametrize("garbage", [b"x", bytes(33)])
async def test_a_peer_that_answers_garbage_is_scored_and_left_alone(autojump_clock, tmp_path, garbage):
    asked = []

    async def babble(message):
        await trio.lowlevel.checkpoint()
        asked.append(trio.current_time())
        return garbage

    async with (
        MemorySwarm(loss=1.0) as swarm,
        swarm.join(THREE) as three,
        Sender(swarm, ONE, tmp_path / "out", THREE.public, TWO.public).life() as sender,
    ):
        with serve_deliveries(three, {GROUPS: Taker(accept, babble)}):
            await sender.outbox.put(items(20))
            await trio.sleep(3600)
            assert sender.outbox.pending == 20, "garbage acknowledges nothing"
            assert 3600 / sender.patience.cap < len(asked) < 4 * 3600 / sender.patience.cap
            assert sender.network.scores()[THREE.public]["bad-answer"] == len(asked)
            async with Receiver(swarm, TWO, tmp_path / "in").life() as receiver:
                await sender.emptied()
                each_once(receiver.handed, 20)


async def test_one_item_that_spoils_a_delivery_holds_up_no_other(autojump_clock, tmp_path):
    """A receiver refuses a whole batch for one item: the item is found, and only it waits."""
    poison = item(77)
    calls = []

    class Picky(Receiver):
        async def keep(self, data):
            calls.append(trio.current_time())
            if poison in unpack(data):
                raise PeerError("a batch with one bad item is refused whole")
            return await super().keep(data)

    async with (
        MemorySwarm(loss=1.0) as swarm,
        Picky(swarm, TWO, tmp_path / "in").life() as receiver,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(200))
        await trio.sleep(2 * sender.patience.moment)
        assert sender.outbox.since(0)[0] == [poison.id]
        assert set(receiver.handed) == set(ids(items(200))) - {poison.id}
        found = len(calls)
        assert found < 30
        await trio.sleep(3600)
        assert len(calls) - found < 4 * 3600 / sender.patience.cap
        await sender.outbox.put([item(1000)])
        await trio.sleep(2 * sender.patience.moment)
        assert sender.outbox.since(0)[0] == [poison.id]


async def test_a_peer_that_refuses_everything_is_not_hammered(autojump_clock, tmp_path):
    calls = []

    async def refuse(_message):
        await trio.lowlevel.checkpoint()
        calls.append(trio.current_time())
        raise PeerError("never")

    async with (
        MemorySwarm(loss=1.0) as swarm,
        swarm.join(TWO) as two,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        with serve_deliveries(two, {GROUPS: Taker(accept, refuse)}):
            await sender.outbox.put(items(300))
            await trio.sleep(600)
            assert len(calls) < 60
        async with swarm.join(THREE):
            pass
        assert sender.outbox.pending == 300


async def test_a_new_leader_gets_what_the_old_one_acknowledged(autojump_clock, tmp_path):
    async with (
        MemorySwarm() as swarm,
        Receiver(swarm, TWO, tmp_path / "old").life() as old,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(30))
        await sender.emptied()
        asked = dict(old.asked)
        async with Receiver(swarm, THREE, tmp_path / "new").life() as new:
            sender.recipients[:] = [THREE.public]
            sender.redelivery.reroute()
            swarm.faults = LinkFaults(loss=1.0)
            await sender.outbox.revive()
            await sender.emptied()
            each_once(new.handed, 30)
        assert old.asked == asked, "who leads no more is asked no more"


async def test_who_is_no_recipient_any_more_is_asked_no_more(autojump_clock, tmp_path):
    async with (
        MemorySwarm(loss=1.0) as swarm,
        Receiver(swarm, TWO, tmp_path / "in", answers=False, gossips=False).life() as silent,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(30))
        await trio.sleep(600)
        asked = silent.asked["by hand"]
        assert 600 / sender.patience.cap < asked < 4 * 600 / sender.patience.cap, (
            "again and again, with pauses"
        )
        each_once(silent.handed, 30)
        sender.recipients.clear()
        sender.redelivery.reroute()
        await trio.sleep(600)
        assert silent.asked["by hand"] == asked
        assert sender.outbox.pending == 30


async def test_a_clock_that_is_set_back_delays_nothing(autojump_clock, tmp_path, monkeypatch):
    now = [2e9]
    monkeypatch.setattr(outbox_room.time, "time", lambda: now[0])
    async with MemorySwarm(loss=1.0) as swarm:
        sender = Sender(swarm, ONE, tmp_path / "out", TWO.public)
        async with sender.life():
            await sender.outbox.put(items(5))
            await trio.sleep(100)
            now[0] -= 1e9
            await sender.outbox.put(items(10))
            await trio.sleep(100)
        async with Receiver(swarm, TWO, tmp_path / "in").life() as receiver, sender.life():
            await trio.sleep(2 * sender.patience.moment)
            each_once(receiver.handed, 10)
            assert sender.outbox.pending == 0


async def test_with_nothing_pending_nothing_wakes(autojump_clock, tmp_path):
    async with (
        MemorySwarm() as swarm,
        Receiver(swarm, TWO, tmp_path / "in").life(),
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        await sender.outbox.put(items(5))
        await sender.emptied()
        await trio.sleep(2 * sender.patience.cap)
        autojump_clock.autojump_threshold = math.inf
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf


async def test_leaving_the_network_ends_redelivery_in_words(autojump_clock, tmp_path):
    async def leave():
        async with MemorySwarm() as swarm, Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender:
            await sender.outbox.put(items(5))
            sender.network.end()
            await trio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        await leave()
    assert caught.group_contains(PeerError, match="left the network")
    assert caught.value.split(PeerError)[1] is None, "and with nothing else"


async def test_items_that_cannot_be_packed_end_it_as_a_bug_of_ours(autojump_clock, tmp_path):
    def unable(_topic, _data):
        raise TooLargeError("does not fit")

    async def run():
        async with MemorySwarm() as swarm, Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender:
            sender.redelivery._pack = unable
            await sender.outbox.put(items(1))
            await trio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.group_contains(DefectError, match="packing items: TooLargeError")


async def test_other_cargo_goes_to_its_own_topic(autojump_clock, tmp_path):
    """One outbox for several topics: a batch is of one topic, whoever packs it."""
    got = {}
    other = topics.topic(bytes(32), topics.VERDICTS)
    both = [*items(3), *(type(each)(each.id[::-1], other, each.data) for each in items(3))]

    async def take(message):
        await trio.lowlevel.checkpoint()
        data = [each.data for each in unpack(message.data)]
        got.setdefault(message.topic, []).extend(data)
        return b"".join(each.id for each in both if each.topic == message.topic and each.data in data)

    async with (
        MemorySwarm() as swarm,
        swarm.join(TWO) as two,
        Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender,
    ):
        with serve_deliveries(two, {topic: Taker(accept, take) for topic in (GROUPS, other)}):
            await sender.outbox.put(both[::2])
            await sender.outbox.put(both[1::2])
            await sender.emptied()
    assert {topic: sorted(data) for topic, data in got.items()} == {
        topic: sorted(each.data for each in both if each.topic == topic) for topic in (GROUPS, other)
    }


def test_pauses_double_up_to_the_cap_and_luck_takes_any_part():
    patience = Patience(first=1.0, cap=60.0)
    assert [patience.pause(n, 1.0) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert patience.pause(10_000, 0.5) == 30
    assert patience.pause(3, 0.0) == 0


def test_a_schedule_gives_what_is_due_once_and_in_order():
    schedule = Schedule()
    for name, due in ((b"c", 3.0), (b"a", 1.0), (b"b", 2.0), (b"a", 2.5), (b"d", 99.0)):
        schedule.set(name, due)
    assert (schedule.next(), len(schedule)) == (2.0, 4)
    assert [schedule.pop(2.6) for _ in range(3)] == [b"b", b"a", None]
    schedule.advance(10.0)
    assert [schedule.pop(10.0) for _ in range(3)] == [b"c", b"d", None]
    assert schedule.next() == math.inf


async def test_a_peer_that_takes_nothing_for_now_is_left_alone_and_gets_all_in_one_later(
    autojump_clock, tmp_path, caplog
):
    """It is not what was delivered that is at fault, so that is not taken apart."""
    taken, told = [], []

    async def take(message):
        await trio.lowlevel.checkpoint()
        taken.append(len(unpack(message.data)))
        return b"".join(each.id for each in unpack(message.data))

    def validator(_message):
        told.append(trio.current_time())
        return SenderMuted("too much of it was of no use") if len(told) < 4 else accept(_message)

    caplog.set_level("INFO")
    async with MemorySwarm() as swarm, swarm.join(TWO) as receiver:
        with serve_deliveries(receiver, {GROUPS: Taker(validator, take)}):
            async with Sender(swarm, ONE, tmp_path / "out", TWO.public).life() as sender:
                await sender.outbox.put(items(40))
                await sender.emptied()
    assert taken == [40]
    assert len(told) == 4
    assert sum("too much of it was of no use" in line for line in caplog.messages) == 3
