"""Grants for those who missed some, from gossip and from whoever is asked."""

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT, IGNORE, Message, Reject
from echo_node.net.memory import MemorySwarm
from echo_node.weights.chain_server import GrantServer
from protocol import (
    ChainError,
    Follower,
    GrantsAnswer,
    GrantsQuestion,
    HeadsQuestion,
    ShownGrant,
    TermVote,
    decode,
    encode,
    limits,
    topics,
)
from tests.election.peers import ANN, BEN, RUN, SAM, VAL, WIN, granted, head_after, peer, rules

RULES = rules((ANN, BEN), (ANN, BEN, VAL))
TOPIC = topics.topic(RUN, topics.GRANTS)


def story(*lengths: int, leaders=(ANN, BEN)) -> Follower:
    """A chain with so many heads in each term, whose leaders take turns."""
    follower = Follower.newcomer(RULES)
    for number, length in enumerate(lengths):
        leader = leaders[number % 2]
        if number:
            vote = TermVote(base=follower.tip.id, leader=leader.public, term=follower.term + 1)
            follower = follower.grant(granted(vote, BEN, VAL))
        for _ in range(length):
            follower = follower.accept(head_after(follower, leader))
    return follower


async def answered(server: Follower, question: GrantsQuestion) -> GrantsAnswer:
    known = {head.id: head for head in server.heads}
    served = GrantServer(lambda: server, known.get)
    return decode(GrantsAnswer, await served.serve(SAM.public, encode(question)))


async def test_an_answer_shows_the_way_from_what_is_held_to_the_base():
    chain = story(5, 3, 2)
    held = HeadsQuestion.of([head.id for head in chain.heads[:2]]).held
    (shown,) = (await answered(chain, GrantsQuestion(held, 1))).grants
    assert shown.grant == chain.grants[0]
    assert shown.branch == tuple(head.sealed for head in chain.heads[2:5])
    first, second = (await answered(chain, GrantsQuestion(held, 2))).grants
    assert (first.grant, second.grant) == chain.grants
    assert (await answered(chain, GrantsQuestion((), 3))).grants[0].grant == chain.grants[1]
    assert (await answered(chain, GrantsQuestion((), 4))).grants == ()
    base = GrantsQuestion((chain.grants[0].vote.base,), 1)
    assert (await answered(chain, base)).grants[0].branch == ()


async def test_a_way_that_is_too_long_is_not_shown(monkeypatch):
    monkeypatch.setattr(limits, "CHAIN_HEADS", 4)
    chain = story(6, 1)
    (shown,) = (await answered(chain, GrantsQuestion((chain.heads[0].id,), 1))).grants
    assert shown.branch == ()
    (shown,) = (await answered(chain, GrantsQuestion((chain.heads[1].id,), 1))).grants
    assert len(shown.branch) == 4


@pytest.mark.parametrize("lengths", [(3, 2), (3, 0), (2, 3, 1), (1, 0, 0), (4, 1, 1, 1, 2)])
@pytest.mark.parametrize("known", [0, 1, 3])
async def test_a_late_comer_catches_up_over_every_change_of_terms(tmp_path, lengths, known):
    chain = story(*lengths)
    async with (
        MemorySwarm() as swarm,
        peer(swarm, VAL, tmp_path, RULES) as val,
        peer(swarm, SAM, tmp_path, RULES) as late,
    ):
        swarm.partition([VAL.public])
        follower = Follower.newcomer(RULES)
        for head in chain.heads:
            if follower.term < head.message.term:
                grant = chain.grants[head.message.term - 2]
                follower = follower.grant(grant)
                val.store.keep_grant(grant)
            follower = follower.accept(head)
            val.store.keep_head(head)
        for grant in chain.grants[follower.term - 1 :]:
            val.store.keep_grant(grant)
        for head in chain.heads[: min(known, lengths[0])]:
            await late.chain.take_head(head.sealed)
        swarm.heal()
        assert await late.chain.ask_around([VAL.public]) or late.follower == val.follower
        while await late.chain.ask_around([VAL.public]):
            pass
        assert late.follower == val.follower
        assert late.network.scores() == {}


async def test_who_is_on_a_branch_that_was_left_goes_back_to_the_base(tmp_path):
    chain = story(3)
    async with (
        MemorySwarm() as swarm,
        peer(swarm, VAL, tmp_path, RULES) as val,
        peer(swarm, ANN, tmp_path, RULES) as ann,
    ):
        for head in chain.heads:
            ann.store.keep_head(head)
            val.store.keep_head(head)
        left = [await ann.publish() for _ in range(2)]
        base = chain.heads[-1]
        with trio.fail_after(5):
            await val.reach(lambda now: now.tip == left[-1])
        val.store.keep_grant(granted(TermVote(base=base.id, leader=BEN.public, term=2), BEN, VAL))
        new = head_after(val.follower, BEN)
        val.store.keep_head(new)
        await ann.chain.ask_around([VAL.public])
        assert ann.follower.heads == (*chain.heads, new)
        assert all(ann.chain.find(head.id) == head for head in left), "what was left is still known"


async def test_a_grant_is_heard_from_gossip_and_a_head_beyond_it_makes_a_follower_ask(tmp_path):
    chain = story(2, 2)
    async with (
        MemorySwarm() as swarm,
        swarm.join(BEN) as ben,
        peer(swarm, SAM, tmp_path, RULES) as sam,
        peer(swarm, VAL, tmp_path, RULES) as val,
    ):
        await trio.testing.wait_all_tasks_blocked(0.05)
        for head in chain.heads[:2]:
            await sam.chain.take_head(head.sealed)
        await ben.publish(TOPIC, encode(chain.grants[0]))
        with trio.fail_after(5):
            await sam.reach(lambda now: now.term == 2)
        await ben.publish(topics.topic(RUN, topics.HEADS), chain.heads[2].sealed)
        with trio.fail_after(5):
            await sam.reach(lambda now: len(now.heads) == 3)
            await val.reach(lambda now: now.term == 2 and len(now.heads) == 3)
        assert sam.follower.leader == BEN.public


async def test_gossip_of_a_grant_that_is_none_is_held_against_whoever_passed_it_on(tmp_path):
    chain = story(2)
    vote = TermVote(base=chain.tip.id, leader=BEN.public, term=2)
    async with MemorySwarm() as swarm, peer(swarm, SAM, tmp_path, RULES) as sam:
        for head in chain.heads:
            await sam.chain.take_head(head.sealed)

        def judged(grant):
            return sam.chain.judge_grant(Message(TOPIC, encode(grant), WIN.public))

        good = granted(vote, BEN, VAL)
        assert judged(good) is ACCEPT
        assert judged(granted(vote, VAL)) == Reject("no-majority")
        assert judged(granted(vote, VAL, WIN)) == Reject("not-elector")
        stranger = TermVote(base=chain.tip.id, leader=SAM.public, term=2)
        assert judged(granted(stranger, BEN, VAL)) == Reject("not-trainer")
        later = TermVote(base=chain.tip.id, leader=BEN.public, term=5)
        assert judged(granted(later, BEN, VAL)) is ACCEPT, "it says that something was missed"
        await sam.chain.take_grant(good)
        assert judged(good) is IGNORE
        assert judged(granted(TermVote(base=bytes(32), leader=ANN.public, term=2), ANN, VAL)) is ACCEPT


async def test_a_peer_that_answers_with_a_forged_grant_is_scored_for_it(tmp_path):
    chain = story(2)
    vote = TermVote(base=chain.tip.id, leader=BEN.public, term=2)

    async def lying(_peer, _question):
        return encode(GrantsAnswer((ShownGrant(granted(vote, VAL), ()),)))

    async with MemorySwarm() as swarm, swarm.join(WIN) as liar, peer(swarm, SAM, tmp_path, RULES) as sam:
        for head in chain.heads:
            await sam.chain.take_head(head.sealed)
        with (
            liar.serve(topics.GRANTS_STREAM, lying, most=limits.SMALL_BYTES),
            pytest.raises(ChainError),
        ):
            await sam.chain.ask_for_grants(WIN.public)
        assert sam.follower.term == 1
        assert sam.network.scores() == {WIN.public: {"no-majority": 1}}


async def test_two_grants_of_one_term_are_both_told_and_nobody_is_followed(tmp_path):
    chain = story(2)
    first = granted(TermVote(base=chain.tip.id, leader=BEN.public, term=2), BEN, VAL)
    second = granted(TermVote(base=chain.tip.id, leader=ANN.public, term=2), ANN, VAL)
    async with (
        MemorySwarm() as swarm,
        peer(swarm, VAL, tmp_path, RULES) as val,
        peer(swarm, SAM, tmp_path, RULES) as sam,
    ):
        for node in (val, sam):
            for head in chain.heads:
                node.store.keep_head(head)
            node.store.keep_grant(first)
        val.store.keep_grant(second)
        await sam.chain.ask_around([VAL.public])
        assert sam.follower == val.follower
        assert sam.chain.holding
        assert sam.follower.revoked == {VAL.public}
