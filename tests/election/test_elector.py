"""Electors: once per term, on disk first, and only when the leader is silent."""

# ruff: noqa: ARG001 -- asking for the clock is using it

import os
import signal

import pytest
import trio

from echo_node.election.elector import VoteLog, as_elector
from echo_node.errors import StoreError
from echo_node.net.base import RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.storage import files
from protocol import (
    ChainError,
    Follower,
    TermVote,
    VoteAnswer,
    VoteQuestion,
    decode,
    encode,
    limits,
    topics,
)
from tests.election.peers import ANN, BEN, CAT, RUN, SAM, VAL, granted, head_after, peer, rules

TRAINERS = (ANN, BEN, CAT)
RULES = rules(TRAINERS, (ANN, BEN, CAT, VAL))


def chain(count=1) -> Follower:
    follower = Follower.newcomer(RULES)
    for _ in range(count):
        follower = follower.accept(head_after(follower, ANN))
    return follower


def vote_for(who, follower, **changes) -> TermVote:
    return TermVote(**({"base": follower.tip.id, "leader": who.public, "term": follower.term + 1} | changes))


def test_a_vote_is_repeated_after_a_restart_and_no_other_is_given(tmp_path):
    follower = chain()
    first = vote_for(BEN, follower)
    ballot = VoteLog(tmp_path, VAL, RUN).vote(follower, first, lease_over=True)
    for box in (VoteLog(tmp_path, VAL, RUN), VoteLog(tmp_path, VAL, RUN)):
        assert box.vote(follower, first, lease_over=True) == ballot
        with pytest.raises(ChainError) as caught:
            box.vote(follower, vote_for(CAT, follower), lease_over=True)
        assert caught.value.rule == "voted"
        assert box.voted(2) == first
        assert box.voted(3) is None


@pytest.mark.parametrize("touch", ["write_at", "sync", "rename", "sync_folder"])
def test_an_elector_that_is_killed_at_any_touch_of_the_disk_gives_one_ballot(tmp_path, touch):
    """Either nobody can have heard of its vote, or it is the only one of its term."""
    follower = chain()
    first, second = vote_for(BEN, follower), vote_for(CAT, follower)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        real = getattr(files, touch)

        def deadly(*args, **options):
            real(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(files, touch, deadly)
        os.write(writing, VoteLog(tmp_path, VAL, RUN).vote(follower, first, lease_over=True).signature)
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert os.read(reading, 64) == b"", "no ballot left before the vote was on disk"
    os.close(reading)
    again = VoteLog(tmp_path, VAL, RUN)
    if touch in {"rename", "sync_folder"}:
        assert again.voted(2) == first
        with pytest.raises(ChainError):
            again.vote(follower, second, lease_over=True)
        assert again.vote(follower, first, lease_over=True).elector == VAL.public
    else:
        assert again.voted(2) is None
        assert again.vote(follower, second, lease_over=True).elector == VAL.public


def test_a_disk_that_fails_gives_no_ballot(tmp_path, monkeypatch):
    follower = chain()
    box = VoteLog(tmp_path, VAL, RUN)

    def full(_handle):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync", full)
        with pytest.raises(StoreError):
            box.vote(follower, vote_for(BEN, follower), lease_over=True)
    assert box.voted(2) is None
    box.vote(follower, vote_for(CAT, follower), lease_over=True)


@pytest.mark.parametrize(
    "damage",
    [b"", b"garbage", encode(TermVote(bytes(32), BEN.public, 3))],
    ids=["torn", "garbage", "another"],
)
def test_an_elector_whose_votes_are_damaged_does_not_vote_at_all(tmp_path, damage):
    follower = chain()
    VoteLog(tmp_path, VAL, RUN).vote(follower, vote_for(BEN, follower), lease_over=True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    with pytest.raises(StoreError) as caught:
        VoteLog(tmp_path, VAL, RUN)
    assert "two leaders" in str(caught.value)


def test_heads_whose_weights_nobody_may_have_do_not_make_a_candidate_late():
    follower = chain(5)
    held, newer = follower.heads[2], follower.heads[3]
    seen = as_elector(follower, held.id, (), held)
    assert seen.tip == held
    assert as_elector(follower, newer.id, (), held).tip == newer, "the base itself is never cut off"
    assert as_elector(follower, follower.heads[1].id, (), held).tip == held, "what is held is not given up"
    assert as_elector(follower, held.id, (), None) is follower
    assert as_elector(follower, bytes(32), (), held) is follower


async def ask(network, elector, vote, branch=()) -> VoteAnswer:
    answer = await network.request(
        elector.public,
        topics.VOTE_STREAM,
        encode(VoteQuestion(tuple(head.sealed for head in branch), vote)),
        deadline=30,
        most=limits.SMALL_BYTES,
    )
    return decode(VoteAnswer, answer)


async def test_the_desk_says_by_which_rule_it_refuses(tmp_path, autojump_clock):
    async with (
        MemorySwarm() as swarm,
        swarm.join(BEN) as ben,
        swarm.join(CAT) as cat,
        peer(swarm, VAL, tmp_path, RULES) as val,
    ):
        for head in chain(2).heads:
            await val.chain.take_head(head.sealed)
        old, tip = val.follower.heads
        vote = vote_for(BEN, val.follower)
        assert (await ask(ben, VAL, vote)).refusal == "lease"
        await val.lease.wait_until_over()
        assert (await ask(cat, VAL, vote)).refusal == "not-candidate"
        assert (await ask(ben, VAL, vote_for(BEN, val.follower, base=old.id))).refusal == "behind"
        assert (await ask(ben, VAL, vote_for(BEN, val.follower, base=bytes(32)))).refusal == "gap"
        assert (await ask(ben, VAL, vote_for(BEN, val.follower, term=9))).refusal == "old-term"
        said = await ask(ben, VAL, vote)
        assert said.refusal is None
        assert await ask(ben, VAL, vote) == said
        assert (await ask(cat, VAL, vote_for(CAT, val.follower))).refusal == "voted"
        assert val.votes.voted(2) == vote
        assert tip.id == vote.base


async def test_an_elector_that_missed_heads_is_shown_them(tmp_path, autojump_clock):
    follower = chain(4)
    async with (
        MemorySwarm() as swarm,
        swarm.join(BEN) as ben,
        peer(swarm, VAL, tmp_path, RULES) as val,
    ):
        await val.chain.take_head(follower.heads[0].sealed)
        await val.lease.wait_until_over()
        vote = vote_for(BEN, follower)
        assert (await ask(ben, VAL, vote)).refusal == "gap"
        assert (await ask(ben, VAL, vote, follower.heads[1:])).signature is not None


async def test_an_elector_that_missed_a_term_asks_the_candidate_for_it(tmp_path, autojump_clock):
    async with (
        MemorySwarm() as swarm,
        peer(swarm, VAL, tmp_path, RULES) as val,
    ):
        await val.lease.wait_until_over()
        async with peer(swarm, BEN, tmp_path, RULES) as ben:
            for head in chain(3).heads:
                ben.store.keep_head(head)
            ben.store.keep_grant(granted(vote_for(CAT, ben.follower), ANN, BEN, CAT))
            vote = vote_for(BEN, ben.follower)
            said = await ask(ben.network, VAL, vote)
            assert said.refusal == "lease", "it has just learnt of a term, whose leader has its whole lease"
            assert val.follower.term == 2
            await val.lease.wait_until_over()
            assert (await ask(ben.network, VAL, vote)).signature is not None


async def test_who_stands_gives_way_to_those_before_it_and_to_nobody_after(tmp_path, autojump_clock):
    async with (
        MemorySwarm() as swarm,
        swarm.join(ANN) as ann,
        swarm.join(CAT) as cat,
        peer(swarm, BEN, tmp_path, RULES) as ben,
    ):
        await ben.chain.take_head(chain().heads[0].sealed)
        await ben.lease.wait_until_over()
        ben.server.set_candidacy(2)
        assert (await ask(cat, BEN, vote_for(CAT, ben.follower))).refusal == "standing"
        assert (await ask(ann, BEN, vote_for(ANN, ben.follower))).signature is not None


async def test_who_is_no_elector_answers_nobody_and_garbage_is_refused(tmp_path, autojump_clock):
    async with (
        MemorySwarm() as swarm,
        swarm.join(BEN) as ben,
        peer(swarm, SAM, tmp_path, RULES),
        peer(swarm, VAL, tmp_path, RULES) as val,
    ):
        with pytest.raises(RequestError) as caught:
            await ask(ben, SAM, vote_for(BEN, chain()))
        assert caught.value.reason == "no-handler"
        with pytest.raises(RequestError) as caught:
            await ben.request(VAL.public, topics.VOTE_STREAM, b"garbage", deadline=9, most=4096)
        assert caught.value.reason == "refused"
        await trio.lowlevel.checkpoint()
        assert val.votes.voted(2) is None
