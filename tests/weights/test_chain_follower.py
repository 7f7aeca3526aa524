"""Hearing the chain: what the rules refuse is refused by name and changes nothing, whoever sends
it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT, IGNORE, Message, Reject, RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.weights.chain_follower import ASK_SECONDS, ChainFollower
from echo_node.weights.chain_server import HeadServer
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import (
    ZERO,
    ChainError,
    HeadsAnswer,
    HeadsQuestion,
    ProtocolError,
    Roster,
    canonical,
    decode,
    encode,
    limits,
    topics,
)
from protocol.errors import BadSignatureError, WrongKindError, WrongRunError
from tests.crafting import forged
from tests.weights.chains import (
    FOLLOWER,
    LEADER,
    RUN,
    STRANGER,
    publish,
    publisher,
    rules,
    state,
    tensor,
    told_otherwise,
)
from tests.weights.stores import files
from tests.weights.swarms import following

OTHER_TYPES = {**state(), "a.scale": tensor("bf16")}
HEADS_TOPIC = topics.topic(RUN, topics.HEADS)


def refused_heads(first):
    """Heads that no follower takes, and why."""
    other_root = publisher().publish(state(9), step=0, roster=Roster(()), groups=()).head
    other_layout = publisher().publish(OTHER_TYPES, step=0, roster=Roster(()), groups=()).head
    by_stranger = publish(1, publisher(STRANGER))[0].head
    of_another_run = publish(1, publisher(run=b"q" * 32))[0].head
    return [
        (by_stranger.sealed, ChainError, "not-trainer"),
        (other_root.sealed, ChainError, "wrong-root"),
        (other_layout.sealed, ChainError, "wrong-layout"),
        (of_another_run.sealed, WrongRunError, "wrong-run"),
        (forged(first.head.sealed), BadSignatureError, "bad-signature"),
        (first.head.sealed[:-1], ProtocolError, "truncated"),
        (b"", ProtocolError, "truncated"),
    ]


def reason(error: ProtocolError) -> str:
    return error.rule if isinstance(error, ChainError) else error.reason


async def test_a_head_that_the_rules_refuse_changes_nothing():
    first, second = publish(2)
    async with following() as puller:
        before = files(puller.store._place._folder)
        for sealed, kind, why in [*refused_heads(first), (second.head.sealed, ChainError, "gap")]:
            with pytest.raises(kind) as caught:
                await puller.chain.take_head(sealed)
            assert reason(caught.value) == why
            assert puller.chain.tip is None
        assert files(puller.store._place._folder) == before
        await puller.chain.take_head(first.head.sealed)
        await puller.chain.take_head(first.head.sealed)
        assert puller.store.follower.heads == (first.head,)


async def test_gossip_that_the_rules_refuse_is_held_against_whoever_passed_it_on():
    first, second = publish(2)
    async with following() as puller:
        judge = puller.chain.judge
        for sealed, _, why in refused_heads(first):
            try:
                said = judge(Message(HEADS_TOPIC, sealed, STRANGER.public))
            except ProtocolError as error:  # which the network turns into the same
                said = Reject(error.reason)
            assert said == Reject(why)
        assert judge(Message(HEADS_TOPIC, first.head.sealed, STRANGER.public)) is ACCEPT
        gap = Message(HEADS_TOPIC, second.head.sealed, STRANGER.public)
        assert judge(gap) is ACCEPT, "it is no fault to know more, and it says that something was missed"


async def test_another_kind_of_message_by_the_leader_is_no_head():
    from protocol import Join, seal

    join = seal(Join(agent="a", engine="torch/f32", head=ZERO, name=""), LEADER, RUN)
    async with following() as puller:
        with pytest.raises(WrongKindError):
            await puller.chain.take_head(join)


async def test_an_older_version_that_is_replayed_changes_nothing():
    made = publish(4)
    async with following() as puller:
        for each in made:
            await puller.chain.take_head(each.head.sealed)
        before = files(puller.store._place._folder)
        for each in made[:3]:
            await puller.chain.take_head(each.head.sealed)
        assert puller.chain.tip == made[-1].head
        assert files(puller.store._place._folder) == before


async def test_below_the_head_of_a_link_nothing_is_taken(tmp_path):
    made = publish(4)
    third = made[2].head
    floor = (1, 2, third.id)
    async with MemorySwarm() as swarm, swarm.join(STRANGER) as network:
        with WeightsStore.open(tmp_path, rules(), layout_of(state()), floor=floor) as store:
            hearing = ChainFollower(network, store)
            with pytest.raises(ChainError) as caught:
                await hearing.take_head(made[0].head.sealed)
            assert caught.value.rule == "below-link"
            assert hearing.judge(Message(HEADS_TOPIC, made[0].head.sealed, LEADER.public)) is IGNORE
            async with swarm.join(LEADER) as leader:
                with leader.serve(
                    topics.CHAIN_STREAM,
                    HeadServer(lambda: [each.head for each in made]).serve,
                    most=limits.SMALL_BYTES,
                ):
                    await hearing.ask(LEADER.public)
            assert store.follower.heads == (third, made[3].head), "what is older is skipped on the way"
            assert network.scores() == {}


async def test_a_leader_that_tells_two_stories_is_caught_and_nothing_follows():
    first, second = publish(2)
    another = told_otherwise(second, luck=b"?" * 32)
    async with following() as puller:
        for each in (first, second, another):
            await puller.chain.take_head(each.head.sealed)
        assert puller.chain.holding
        assert puller.chain.tip == first.head
        with pytest.raises(ChainError) as caught:
            await puller.chain.take_head(second.head.sealed)
        assert caught.value.rule == "revoked"


async def test_whoever_waits_for_a_head_is_woken_by_it_and_by_no_other():
    chain = [made.head for made in publish(3)]
    found = []

    async def wait(hearing):
        found.append(await hearing.wait_for(chain[1].id))

    async with following() as puller, trio.open_nursery() as nursery:
        nursery.start_soon(wait, puller.chain)
        for head, seen in zip(chain, ([], [chain[1]], [chain[1]]), strict=True):
            await puller.chain.take_head(head.sealed)
            await trio.testing.wait_all_tasks_blocked()
            assert found == seen
        assert await puller.chain.wait_for(chain[0].id) == chain[0], "what was heard before is found at once"
        assert puller.chain.find(b"?" * 32) is None


async def test_waiting_for_something_newer_gives_the_tip():
    chain = [made.head for made in publish(3)]
    async with following() as puller, trio.open_nursery() as nursery:
        hearing = puller.chain
        for head in chain[:2]:
            await hearing.take_head(head.sealed)
        assert await hearing.wait_for_newer(None) == chain[1]
        assert await hearing.wait_for_newer(chain[0].id) == chain[1]
        newer = []

        async def wait():
            newer.append(await hearing.wait_for_newer(chain[1].id))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await hearing.take_head(chain[1].sealed)
        await trio.testing.wait_all_tasks_blocked()
        assert newer == []
        await hearing.take_head(chain[2].sealed)
        await trio.testing.wait_all_tasks_blocked()
        assert newer == [chain[2]]


# Asking


async def test_asking_goes_on_over_many_answers(monkeypatch):
    monkeypatch.setattr(limits, "CHAIN_HEADS", 3)
    made = publish(8)
    async with following(*made) as puller:
        await puller.chain.ask(LEADER.public)
        assert puller.store.follower.heads == tuple(each.head for each in made)


async def test_asking_from_the_middle_is_for_the_rest_alone():
    made = publish(5)
    asked = []
    server = HeadServer(lambda: [each.head for each in made])

    async def chain(peer, question):
        asked.append(decode(HeadsQuestion, question).held[0])
        return await server.serve(peer, question)

    async with following(chain=chain) as puller:
        for each in made[:2]:
            await puller.chain.take_head(each.head.sealed)
        await puller.chain.ask(LEADER.public)
        assert puller.chain.tip == made[-1].head
    assert asked == [made[1].head.id, made[4].head.id]


async def test_a_peer_that_has_nothing_leaves_everything_as_it_was():
    async with following() as puller:
        await puller.chain.ask(LEADER.public)
        assert puller.chain.tip is None
        assert not await puller.chain.ask_around()


async def test_a_peer_that_repeats_itself_for_ever_is_asked_twice_and_no_more():
    made = publish(3)
    asked = []

    async def again(_peer, question):
        asked.append(question)
        return encode(HeadsAnswer(tuple(each.head.sealed for each in made)))

    async with following(chain=again) as puller:
        await puller.chain.ask(LEADER.public)
        assert puller.chain.tip == made[-1].head
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "truncated"),
        (b"garbage", "trailing-bytes"),
        (canonical.encode({"heads": [b"garbage"]}), "trailing-bytes"),
        (canonical.encode({}), "missing-field"),
        (canonical.encode({"heads": [b"x"] * 300}), "out-of-range"),
    ],
)
async def test_a_peer_that_sends_garbage_is_scored_and_changes_nothing(answer, why):
    async def garbage(_peer, _question):
        return answer

    async with following(chain=garbage) as puller:
        with pytest.raises(ProtocolError):
            await puller.chain.ask(LEADER.public)
        assert puller.chain.tip is None
        assert puller._network.scores() == {LEADER.public: {why: 1}}


async def test_a_peer_that_answers_with_heads_that_the_rules_refuse_is_scored_for_it():
    first = publish(1)[0]
    for sealed, kind, why in refused_heads(first)[:5]:

        async def lying(_peer, _question, sealed=sealed):
            return encode(HeadsAnswer((sealed,)))

        async with following(chain=lying) as puller:
            with pytest.raises(kind):
                await puller.chain.ask(LEADER.public)
            assert puller.chain.tip is None
            assert puller._network.scores() == {LEADER.public: {why: 1}}


async def test_what_was_good_before_the_garbage_is_kept():
    made = publish(3)

    async def half(_peer, _question):
        return encode(HeadsAnswer((made[0].head.sealed, made[1].head.sealed, b"garbage")))

    async with following(chain=half) as puller:
        with pytest.raises(ProtocolError):
            await puller.chain.ask(LEADER.public)
        assert puller.chain.tip == made[1].head


async def test_a_peer_that_skips_a_head_or_turns_them_round_is_not_followed():
    made = publish(3)
    for order in ((0, 2), (2, 1, 0)):

        async def skipping(_peer, _question, order=order):
            return encode(HeadsAnswer(tuple(made[n].head.sealed for n in order)))

        async with following(chain=skipping) as puller:
            with pytest.raises(ChainError) as caught:
                await puller.chain.ask(LEADER.public)
            assert caught.value.rule == "gap"


async def test_an_answer_longer_than_any_honest_one_is_not_read():
    async def endless(_peer, _question):
        return b"x" * (limits.HEADS_BYTES + 1)

    async with following(chain=endless) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.chain.ask(LEADER.public)
    assert caught.value.reason == "too-large"


async def test_a_peer_that_never_answers_costs_one_deadline(autojump_clock):
    async def silent(_peer, _question):
        await trio.sleep_forever()

    async with following(chain=silent) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.chain.ask(LEADER.public)
    assert caught.value.reason == "deadline"
    assert autojump_clock.current_time() <= ASK_SECONDS + 1


# Both


@asynccontextmanager
async def heard(swarm):
    """A follower that hears, on a swarm."""
    async with swarm.join(STRANGER) as network:
        with WeightsStore.temporary(rules(), layout_of(state())) as store:
            hearing = ChainFollower(network, store)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hearing.follow)
                await trio.testing.wait_all_tasks_blocked(0.01)
                yield hearing
                nursery.cancel_scope.cancel()


async def test_gossip_that_missed_some_heads_makes_the_follower_ask_for_them():
    made = publish(6)
    async with MemorySwarm() as swarm, swarm.join(LEADER) as leader, heard(swarm) as hearing:
        server = HeadServer(lambda: [each.head for each in made])
        with leader.serve(topics.CHAIN_STREAM, server.serve, most=limits.SMALL_BYTES):
            await leader.publish(HEADS_TOPIC, made[5].head.sealed)
            with trio.fail_after(5):
                await hearing.wait_for(made[5].head.id)
        assert hearing.tip == made[5].head


async def test_any_peer_can_be_asked_where_the_leader_is_gone():
    made = publish(3)
    async with MemorySwarm() as swarm, swarm.join(FOLLOWER) as other, heard(swarm) as hearing:
        server = HeadServer(lambda: [each.head for each in made])
        with other.serve(topics.CHAIN_STREAM, server.serve, most=limits.SMALL_BYTES):
            assert await hearing.ask_around()
        assert hearing.tip == made[2].head
