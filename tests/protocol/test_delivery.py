"""A delivery is gossip for one peer: the same bytes, judged the same way, and answered however
often it comes.
"""

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT, IGNORE, Message, Reject, RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import (
    ANSWER_BYTES,
    BURST,
    PER_SECOND,
    Taker,
    deliver,
    serve_deliveries,
)
from protocol import Delivery, Envelope, Join, ProtocolError, decode, encode, limits, topics

from .examples import DELIVERY, RUN, SAMPLER, SEALED_GROUP, SEALED_JOIN, STRANGER, TRAINER, name
from .idl import SPEC

JOINS, GROUPS = topics.topic(RUN, topics.JOINS), topics.topic(RUN, topics.GROUPS)


def test_a_delivery_names_the_topic_of_its_data():
    assert Delivery.on(JOINS, SEALED_JOIN) == DELIVERY
    for cargo in topics.CARGOES:
        topic = topics.topic(RUN, cargo)
        assert decode(Delivery, encode(Delivery.on(topic, b"x"))).topic == topic


@pytest.mark.parametrize(
    "topic",
    ["", "/echo/2/joins", JOINS + "/", JOINS.replace("/2/", "/1/"), JOINS[:-5] + "wishes", JOINS + "\n"],
)
def test_what_is_no_topic_of_a_run_cannot_be_delivered(topic):
    with pytest.raises(ProtocolError):
        Delivery.on(topic, b"x")


def test_the_longest_gossip_can_be_delivered_and_nothing_longer():
    longest = Delivery("receipts", bytes(limits.GOSSIP_BYTES), RUN)
    assert decode(Delivery, encode(longest)) == longest
    with pytest.raises(ProtocolError):
        encode(Delivery("receipts", bytes(limits.GOSSIP_BYTES + 1), RUN))


def test_the_spec_says_how_long_an_answer_may_be():
    assert f"of at most {ANSWER_BYTES} bytes" in SPEC.read_text().split("## topics")[1].split("\n## ")[0]


def joins(message: Message):
    """The validator of a topic, as gossip has it."""
    Envelope.parse(message.data).claim(Join, RUN)
    return ACCEPT if message.sender == SAMPLER.public else Reject("not-yours")


async def answered(network, topic, data):
    try:
        return await deliver(network, TRAINER.public, topic, data, deadline=5)
    except RequestError as error:
        return f"{error.reason}: {error.what}"


def test_a_delivery_is_judged_as_gossip_would_be():
    trio.run(judge_deliveries)


async def judge_deliveries():
    taken = []

    async def take(message):
        await trio.lowlevel.checkpoint()
        taken.append(message)
        return b"receipt"

    def bug(_message):
        raise KeyError("ours")

    async with MemorySwarm() as swarm, swarm.join(TRAINER) as trainer, swarm.join(SAMPLER) as sampler:
        takers = {
            JOINS: Taker(joins, take),
            GROUPS: Taker(lambda _: IGNORE, take),
            topics.topic(RUN, topics.HEADS): Taker(bug, take),
        }
        with serve_deliveries(trainer, takers):
            assert await answered(sampler, JOINS, SEALED_JOIN) == b"receipt"
            assert taken == [Message(JOINS, SEALED_JOIN, SAMPLER.public)]
            assert "wrong-kind" in await answered(sampler, JOINS, SEALED_GROUP)
            assert trainer.scores() == {SAMPLER.public: {"wrong-kind": 1}}
            assert "not wanted" in await answered(sampler, GROUPS, SEALED_GROUP)
            assert "not wanted" in await answered(sampler, topics.topic(RUN, topics.HEADS), b"x")
            for nowhere in (
                topics.topic(RUN, topics.VERDICTS),
                topics.topic(name("another run"), topics.JOINS),
            ):
                assert "of that run are taken here" in await answered(sampler, nowhere, SEALED_JOIN)
            assert trainer.scores() == {SAMPLER.public: {"wrong-kind": 1}}, (
                "only what could be seen is scored"
            )
            with pytest.raises(RequestError, match="missing-field"):
                await sampler.request(TRAINER.public, topics.DELIVER_STREAM, b"\x80", deadline=5, most=9)
            assert trainer.scores()[SAMPLER.public]["missing-field"] == 1
            async with swarm.join(STRANGER) as other:
                assert "not-yours" in await answered(other, JOINS, SEALED_JOIN)
            assert trainer.scores()[STRANGER.public] == {"not-yours": 1}
    assert len(taken) == 1


def test_the_same_delivery_again_is_answered_again():
    trio.run(repeat_a_delivery)


async def repeat_a_delivery():
    async def take(_message):
        await trio.lowlevel.checkpoint()
        return b"receipt"

    async with MemorySwarm() as swarm, swarm.join(TRAINER) as trainer, swarm.join(SAMPLER) as sampler:
        with serve_deliveries(trainer, {JOINS: Taker(joins, take)}):
            for _ in range(3):
                assert await answered(sampler, JOINS, SEALED_JOIN) == b"receipt"


def test_who_delivers_without_end_is_told_to_come_later_and_others_are_not():
    trio.run(deliver_without_end, clock=trio.testing.MockClock(autojump_threshold=0.01))


async def deliver_without_end():
    async def take(_message):
        await trio.lowlevel.checkpoint()
        return b"receipt"

    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as trainer,
        swarm.join(SAMPLER) as sampler,
        swarm.join(STRANGER) as other,
    ):
        with serve_deliveries(trainer, {JOINS: Taker(lambda _: ACCEPT, take)}):
            taken = 0
            while (said := await answered(sampler, JOINS, SEALED_JOIN)) == b"receipt":
                taken += 1
            assert BURST / 2 < taken < BURST + PER_SECOND
            assert said.startswith("busy: ")
            assert "faster than is taken" in said
            assert await answered(other, JOINS, SEALED_JOIN) == b"receipt"
            for _ in range(int(PER_SECOND)):  # to have come too early costs nothing
                assert await answered(sampler, JOINS, SEALED_JOIN) == said
            await trio.sleep(2 / PER_SECOND)
            assert await answered(sampler, JOINS, SEALED_JOIN) == b"receipt"
