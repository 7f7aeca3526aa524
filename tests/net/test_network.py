"""Gossip, provider records and peers on every implementation of the network."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.errors import DefectError, EchoError, PeerError
from echo_node.net.base import ACCEPT, IGNORE, Message, PeerEvent, Reject, SenderMuted
from protocol import limits
from protocol.errors import BadSignatureError
from tests.net.behaviour import (
    IDENTITIES,
    KEY,
    SOON,
    STREAM,
    TOPIC,
    accept,
    next_of,
    refused,
    until,
)


async def test_gossip_reaches_every_subscriber_and_not_its_publisher(join):
    async with join(IDENTITIES[0]) as one, join(IDENTITIES[1]) as two, join(IDENTITIES[2]) as three:
        await until(lambda: len(one.peers()) == 2)
        async with (
            one.subscribe(TOPIC, accept) as own,
            two.subscribe(TOPIC, accept) as first,
            three.subscribe(TOPIC, accept) as second,
        ):
            await one.publish(TOPIC, b"from one")
            for inbox in (first, second):
                message = await next_of(inbox)
                assert (message.topic, message.data) == (TOPIC, b"from one")
            await two.publish(TOPIC, b"from two")
            assert (await next_of(own)).data == b"from two"


async def test_gossip_names_the_peer_that_handed_it_over(pair):
    one, two = pair
    async with two.subscribe(TOPIC, accept) as inbox:
        await one.publish(TOPIC, b"x")
        assert (await next_of(inbox)).sender == one.public


async def test_topics_are_apart(pair):
    one, two = pair
    async with two.subscribe(TOPIC, accept) as inbox, two.subscribe(TOPIC + "/b", accept) as other:
        await one.publish(TOPIC + "/b", b"b")
        await one.publish(TOPIC, b"a")
        assert (await next_of(inbox)).data == b"a"
        assert (await next_of(other)).data == b"b"


async def test_the_same_bytes_are_one_message(pair):
    one, two = pair
    async with two.subscribe(TOPIC, accept) as inbox, one.subscribe(TOPIC, accept) as back:
        await one.publish(TOPIC, b"x")
        await next_of(inbox)
        await one.publish(TOPIC, b"x")
        await two.publish(TOPIC, b"x")
        await one.publish(TOPIC, b"y")
        await two.publish(TOPIC, b"z")
        assert (await next_of(inbox)).data == b"y"
        assert (await next_of(back)).data == b"z"


async def test_a_refused_message_is_not_delivered_and_its_sender_is_scored_for_the_reason(pair):
    one, two = pair

    def validator(message):
        if message.data == b"forged":
            raise BadSignatureError("no")
        return {b"old": IGNORE, b"bad": Reject("malformed")}.get(message.data, ACCEPT)

    async with two.subscribe(TOPIC, validator) as inbox:
        for data in (b"old", b"bad", b"forged", b"good"):
            await one.publish(TOPIC, data)
        assert (await next_of(inbox)).data == b"good"
    assert two.scores() == {one.public: {"malformed": 1, "bad-signature": 1}}
    assert one.scores() == {}


@pytest.mark.parametrize(
    "bug", [ValueError("a bug"), EchoError("a bug"), ExceptionGroup("g", [EchoError("a")])]
)
async def test_a_validator_that_fails_is_counted_and_harms_nobody(pair, bug):
    one, two = pair

    def validator(message):
        if message.data == b"poison":
            raise bug
        return True if message.data == b"true" else ACCEPT

    async with two.subscribe(TOPIC, validator) as inbox:
        for data in (b"poison", b"true", b"good"):
            await one.publish(TOPIC, data)
        assert (await next_of(inbox)).data == b"good"
    assert two.counts()["contained"] == 2
    assert two.scores() == {}


async def test_a_slow_reader_loses_the_oldest_and_holds_up_nobody(pair):
    one, two = pair
    async with two.subscribe(TOPIC, accept, capacity=3) as slow, two.subscribe(TOPIC, accept) as quick:
        for n in range(10):
            await one.publish(TOPIC, b"%d" % n)
        assert [(await next_of(quick)).data for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert slow.dropped == 7
        assert [(await next_of(slow)).data for _ in range(3)] == [b"7", b"8", b"9"]
    assert two.counts()["dropped"] == 7


async def test_the_largest_gossip_arrives_and_a_larger_one_is_refused_at_once(pair):
    one, two = pair
    async with two.subscribe(TOPIC, accept) as inbox:
        with pytest.raises(DefectError, match="at most 65536"):
            await one.publish(TOPIC, bytes(limits.GOSSIP_BYTES + 1))
        await one.publish(TOPIC, bytes(limits.GOSSIP_BYTES))
        assert len((await next_of(inbox)).data) == limits.GOSSIP_BYTES


@pytest.mark.parametrize("data", [bytearray(b"x"), "x", memoryview(b"x"), None])
async def test_only_bytes_travel(pair, data):
    one, two = pair
    with pytest.raises(TypeError, match="bytes"):
        await one.publish(TOPIC, data)
    with pytest.raises(TypeError, match="bytes"):
        await one.request(two.public, STREAM, data, deadline=SOON, most=10)
    with pytest.raises(TypeError, match="bytes"):
        await one.provide(data)


async def test_a_left_subscription_ends_for_whoever_reads_it(pair):
    _one, two = pair
    ended = trio.Event()

    async def read(inbox):
        async for _ in inbox:
            pass
        ended.set()

    async with trio.open_nursery() as nursery:
        async with two.subscribe(TOPIC, accept) as inbox:
            nursery.start_soon(read, inbox)
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(SOON):
            await ended.wait()


async def test_who_announces_a_key_is_found_by_others(join):
    async with join(IDENTITIES[0]) as one, join(IDENTITIES[1]) as two, join(IDENTITIES[2]) as three:
        await until(lambda: len(three.peers()) == 2)
        assert await three.find(KEY, 5) == []
        await one.provide(KEY)
        await two.provide(KEY)
        await two.provide(KEY)
        assert set(await three.find(KEY, 5)) == {one.public, two.public}
        assert await one.find(KEY, 5) == [two.public]
        assert len(await three.find(KEY, 1)) == 1
        assert await three.find(KEY[:-1] + b"x", 5) == []


async def test_comings_and_goings_are_seen(join):
    async with join(IDENTITIES[0]) as one, one.watch() as events:
        async with join(IDENTITIES[1]) as two:
            assert await next_of(events) == PeerEvent(two.public, joined=True)
            assert one.peers() == {two.public}
            await two.provide(KEY)
            assert await one.find(KEY, 5) == [two.public]
        assert await next_of(events) == PeerEvent(IDENTITIES[1].public, joined=False)
        assert one.peers() == frozenset()
        assert await one.find(KEY, 5) == []


async def test_a_node_that_comes_back_is_heard_at_once(join):
    async with join(IDENTITIES[0]) as one, one.subscribe(TOPIC, accept) as inbox:
        for data in (b"first life", b"second life"):
            async with join(IDENTITIES[1]) as two:
                await until(lambda two=two: two.public in one.peers())
                await two.publish(TOPIC, data)
                assert (await next_of(inbox)).data == data


async def test_leaving_ends_what_waits_on_the_network(join):
    told = []

    async def hold(_peer, _data):
        await trio.sleep_forever()

    async def read(inbox):
        with pytest.raises(PeerError, match="left the network"):
            await inbox.receive()
        told.append("subscription")

    async def ask(network, peer, reason):
        error = await refused(network.request(peer, STREAM, b"", deadline=SOON, most=1))
        assert error.reason == reason
        told.append(reason)

    async with join(IDENTITIES[0]) as one, trio.open_nursery() as nursery:
        with one.serve(STREAM, hold, most=1):
            leaving = join(IDENTITIES[1])
            two = await leaving.__aenter__()
            await until(lambda: two.public in one.peers())
            with two.serve(STREAM, hold, most=1):
                async with two.subscribe(TOPIC, accept) as inbox:
                    nursery.start_soon(read, inbox)
                    nursery.start_soon(ask, two, one.public, "left")
                    nursery.start_soon(ask, one, two.public, "unreachable")
                    await trio.testing.wait_all_tasks_blocked()
                    await leaving.__aexit__(None, None, None)
                    await until(lambda: len(told) == 3)
    assert sorted(told) == ["left", "subscription", "unreachable"]
    assert two.peers() == frozenset()
    with pytest.raises(PeerError, match="left"):
        await two.publish(TOPIC, b"x")
    assert (await refused(two.request(one.public, STREAM, b"", deadline=SOON, most=1))).reason == "left"


async def test_faults_are_kept_by_peer_and_reason(pair):
    one, two = pair
    for reason in ("bad-frame", "bad-frame", "late"):
        one.score(two.public, reason)
    assert one.scores() == {two.public: {"bad-frame": 2, "late": 1}}
    assert two.scores() == {}


async def test_a_peer_that_sends_mostly_rubbish_is_not_heard_for_a_while_and_the_reason_is_kept(join):
    def validator(message):
        return Reject("malformed") if message.data.startswith(b"bad") else ACCEPT

    async with join(IDENTITIES[0]) as one, join(IDENTITIES[1]) as two, join(IDENTITIES[2]) as three:
        await until(lambda: len(two.peers()) == 2)
        async with two.subscribe(TOPIC, validator) as inbox:
            for n in range(20):
                await one.publish(TOPIC, b"bad %d" % n)
            await until(lambda: one.public in two.mutes())
            await one.publish(TOPIC, b"good, too late")
            await three.publish(TOPIC, b"good")
            assert (await next_of(inbox)).data == b"good"
            assert two.mutes()[one.public].reasons["malformed"] > 8
            assert two.mutes()[one.public].seconds > 0
            assert three.public not in two.mutes()


async def test_a_few_bad_messages_among_many_good_ones_mute_nobody(pair):
    one, two = pair

    def validator(message):
        return Reject("malformed") if message.data.startswith(b"bad") else ACCEPT

    async with two.subscribe(TOPIC, validator) as inbox:
        for n in range(60):
            await one.publish(TOPIC, b"good %d" % n)
            await next_of(inbox)
        for n in range(12):
            await one.publish(TOPIC, b"bad %d" % n)
        await one.publish(TOPIC, b"good at last")
        assert (await next_of(inbox)).data == b"good at last"
    assert two.scores() == {one.public: {"malformed": 12}}
    assert two.mutes() == {}


async def test_who_is_not_heard_does_not_keep_others_from_being_heard(join):
    """It may be the first to forward another's message, which arrives from the other too."""
    async with join(IDENTITIES[0]) as one, join(IDENTITIES[1]) as two, join(IDENTITIES[2]) as three:
        await until(lambda: len(two.peers()) == 2)

        def validator(message):
            return SenderMuted("for now") if message.sender == one.public else ACCEPT

        async with two.subscribe(TOPIC, validator) as inbox:
            await one.publish(TOPIC, b"good")
            await until(lambda: two.counts().get("ignored"))
            await three.publish(TOPIC, b"good")
            assert await next_of(inbox) == Message(TOPIC, b"good", three.public)
        assert two.scores() == {}
