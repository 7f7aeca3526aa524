"""Receipts: everything, in as few messages as hold it, and one answer per group."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.trainer import receipts as room
from echo_node.trainer.receipts import EVERY_SECONDS, Receipts
from protocol import Receipt, limits, open_sealed, topics
from tests.crafting import SAMPLERS, TRAINER, Chain, open_run

RUN = open_run()
HEAD = Chain(RUN).next()


def ids(start: int, count: int) -> list[bytes]:
    return [n.to_bytes(32) for n in range(start, start + count)]


class Listener:
    def __init__(self, inbox):
        self._inbox = inbox

    async def received(self) -> list[Receipt]:
        """All receipts so far, each under the trainer's seal and within the limits of the wire."""
        await trio.testing.wait_all_tasks_blocked()
        return [
            open_sealed((await self._inbox.receive()).data, Receipt, RUN.id, signer=TRAINER.public).message
            for _ in range(len(self._inbox))
        ]


@asynccontextmanager
async def desk(head=HEAD):
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as trainer,
        swarm.join(SAMPLERS[0]) as sampler,
        sampler.subscribe(topics.topic(RUN.id, topics.RECEIPTS), lambda _: ACCEPT) as inbox,
    ):
        receipts = Receipts(trainer, TRAINER, RUN.id)
        if head is not None:
            receipts.set_head(head)
        yield receipts, Listener(inbox)


def answers(receipts: list[Receipt]) -> list[tuple[bytes, str]]:
    return [
        *((group, "accepted") for receipt in receipts for group in receipt.accepted_ids()),
        *(pair for receipt in receipts for pair in receipt.refused_ids()),
    ]


async def test_one_receipt_says_what_was_taken_what_was_refused_and_why():
    async with desk() as (receipts, listener):
        receipts.rate = 2.5
        for group in ids(0, 3):
            receipts.accept(group)
        receipts.refuse(ids(3, 1)[0], "stale")
        receipts.refuse(ids(4, 1)[0], "duplicate")
        receipts.refuse(ids(5, 1)[0], "stale")
        await receipts.send()
        (receipt,) = await listener.received()
    assert list(receipt.accepted_ids()) == ids(0, 3)
    assert [(refusal.reason, refusal.ids) for refusal in receipt.refused] == [
        ("duplicate", ids(4, 1)[0]),
        ("stale", ids(3, 1)[0] + ids(5, 1)[0]),
    ]
    assert (receipt.head, receipt.version, receipt.term, receipt.rate) == (HEAD.id, 0, 1, 2.5)


async def test_nothing_to_say_is_not_said():
    async with desk() as (receipts, listener):
        await receipts.send()
        assert await listener.received() == []


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [(768, 0), (769, 0), (0, 768), (0, 769), (500, 500), (768, 1), (2_000, 3_000)],
)
async def test_however_many_there_are_each_is_answered_once(accepted, refused):
    async with desk() as (receipts, listener):
        for group in ids(0, accepted):
            receipts.accept(group)
        for group in ids(accepted, refused):
            receipts.refuse(group, "full")
        await receipts.send()
        sent = await listener.received()
        assert len(sent) == -(-(accepted + refused) // limits.RECEIPT_IDS), "as few as it takes"
        answered = answers(sent)
        assert sorted(answered) == sorted(
            [(group, "accepted") for group in ids(0, accepted)]
            + [(group, "full") for group in ids(accepted, refused)]
        )
        await receipts.send()
        assert await listener.received() == []


async def test_a_group_that_comes_again_after_it_was_taken_is_told_that_it_was_taken():
    """Gossip repeats itself, and a redelivered group must not look lost to its sampler."""
    (group,) = ids(7, 1)
    async with desk() as (receipts, listener):
        receipts.accept(group)
        receipts.refuse(group, "duplicate")
        await receipts.send()
        assert answers(await listener.received()) == [(group, "accepted")]
        receipts.rate = 1.0
        receipts.refuse(group, "duplicate")
        await receipts.send()
        assert answers(await listener.received()) == [(group, "accepted")]


async def test_a_strangers_bad_copy_of_a_group_does_not_undo_its_acceptance():
    """A group's id does not cover its signature: anybody can send a forged copy."""
    (group,) = ids(7, 1)
    async with desk() as (receipts, listener):
        receipts.refuse(group, "wrong-signature")
        receipts.accept(group)
        await receipts.send()
        receipts.rate = 1.0
        receipts.refuse(group, "wrong-signature")
        await receipts.send()
        assert set(answers(await listener.received())) == {(group, "accepted")}


async def test_more_than_one_message_of_acceptances_and_a_late_refusal_of_the_first_do_not_overlap():
    async with desk() as (receipts, listener):
        for group in ids(0, 1_000):
            receipts.accept(group)
        for group in ids(0, 1_000):
            receipts.refuse(group, "duplicate")
        await receipts.send()
        assert set(answers(await listener.received())) == {(group, "accepted") for group in ids(0, 1_000)}


async def test_before_there_is_a_head_answers_wait_and_their_number_is_bounded():
    async with desk(head=None) as (receipts, listener):
        for group in ids(0, room.MOST_WAITING + 100):
            receipts.refuse(group, "stale")
        await receipts.send()
        assert await listener.received() == []
        receipts.set_head(HEAD)
        await receipts.send()
        assert len(answers(await listener.received())) == room.MOST_WAITING


async def test_what_was_taken_is_remembered_for_a_while_and_not_for_ever():
    async with desk() as (receipts, listener):
        for group in ids(0, room.MOST_WAITING + 50):
            receipts.accept(group)
        await receipts.send()
        await listener.received()
        assert len(receipts._taken) == room.MOST_WAITING
        receipts.refuse(ids(0, 1)[0], "duplicate")
        receipts.refuse(ids(room.MOST_WAITING, 1)[0], "duplicate")
        await receipts.send()
        assert answers(await listener.received()) == [
            (ids(room.MOST_WAITING, 1)[0], "accepted"),
            (ids(0, 1)[0], "duplicate"),
        ]


async def test_receipts_go_out_by_themselves_and_by_the_clock(autojump_clock):  # noqa: ARG001 - it jumps
    async with desk() as (receipts, listener), trio.open_nursery() as nursery:
        nursery.start_soon(receipts.send_periodically)
        receipts.accept(ids(0, 1)[0])
        receipts.accept(ids(1, 1)[0])
        await trio.sleep(1.5 * EVERY_SECONDS)
        assert len(await listener.received()) == 1, "gathered, not one by one"
        receipts.accept(ids(2, 1)[0])
        await trio.sleep(EVERY_SECONDS)
        assert len(await listener.received()) == 1
        nursery.cancel_scope.cancel()


class Hushed:
    """A network's `publish` alone: what was published, opened."""

    def __init__(self):
        self.receipts = []

    async def publish(self, _topic, data):
        await trio.lowlevel.checkpoint()
        self.receipts.append(open_sealed(data, Receipt, RUN.id).message)


@given(
    st.lists(
        st.one_of(
            st.just(None),
            st.tuples(st.just("accept"), st.integers(0, 5)),
            st.tuples(st.sampled_from(["stale", "full", "duplicate"]), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_in_whatever_order_things_happen_what_is_accepted_is_never_refused_afterwards(order):
    network = Hushed()

    async def play():
        receipts = Receipts(network, TRAINER, RUN.id)
        receipts.set_head(HEAD)
        for event in [*order, None]:
            if event is None:
                await receipts.send()
            elif event[0] == "accept":
                receipts.accept(ids(event[1], 1)[0])
            else:
                receipts.refuse(ids(event[1], 1)[0], event[0])

    trio.run(play)
    taken = set()
    for receipt in network.receipts:
        taken |= set(receipt.accepted_ids())
        assert not taken & {group for group, _ in receipt.refused_ids()}
    assert taken == {ids(event[1], 1)[0] for event in order if event and event[0] == "accept"}
    asked = {ids(event[1], 1)[0] for event in order if event}
    assert {group for group, _ in answers(network.receipts)} == asked, "everybody gets an answer"


async def test_another_rate_is_told_by_itself_and_a_rate_that_hardly_moved_is_not():
    async with desk() as (receipts, listener):
        for rate, expected in ((None, []), (8.0, [8.0]), (7.0, []), (2.0, [2.0]), (None, [None]), (None, [])):
            receipts.rate = rate
            await receipts.send()
            received = await listener.received()
            assert [receipt.rate for receipt in received] == expected
            assert answers(received) == []


async def test_an_announcement_that_comes_twice_is_answered_once_and_stops_nobody():
    """Taken and refused as a copy, in either order: two answers ended the trainer."""
    first, second = ids(1, 2)
    async with desk() as (receipts, listener):
        receipts.take_announcement(first)
        receipts.refuse(first, "duplicate")
        receipts.refuse(second, "not-in-roster")
        receipts.take_announcement(second)
        assert receipts.answer([first, second], [first, first, second])
        await receipts.send()
        (receipt,) = await listener.received()
    assert set(receipt.announced_ids()) == {first, second}
    assert not receipt.refused
