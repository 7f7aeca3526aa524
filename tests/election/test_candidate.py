"""The leader is gone: who leads then, who follows, and that it is one at most."""

# ruff: noqa: ARG001 -- asking for the clock is using it

import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest
import trio

from echo_node.election.candidate import PAUSES, STEADFAST
from echo_node.errors import ConfigError
from echo_node.net.memory import MemorySwarm
from protocol import TermVote, VoteAnswer, encode, limits, topics
from protocol.chain import order
from tests.election.peers import ANN, BEN, CAT, LEASE, SAM, VAL, WIN, granted, head_after, peer, rules


async def all_hold(peers, head):
    for each in peers:
        await each.reach(lambda now: now.tip is not None and now.tip.id == head.id)


async def test_the_leader_vanishes_a_standby_leads_and_the_old_leader_follows(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ben, val, sam = [
            await stack.enter_async_context(peer(swarm, who, tmp_path)) for who in (BEN, VAL, SAM)
        ]
        async with peer(swarm, ANN, tmp_path) as ann, trio.open_nursery() as nursery:
            nursery.start_soon(ann.lead)
            for _ in range(3):
                last = await ann.publish()
            await all_hold((ben, val, sam), last)
            await trio.sleep(3 * LEASE)
            assert not any(each.lease.is_over for each in (ann, ben, val, sam)), "it beats"
            assert not await ben.candidate.stand(), "nobody takes over from a leader that is alive"
            assert val.votes.voted(2) is None
            nursery.cancel_scope.cancel()
        await sam.lease.wait_until_stale()
        await ben.lease.wait_until_over()
        assert await ben.candidate.stand()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ben.lead)
            first = await ben.publish()
            assert first.message.term == 2
            await all_hold((val, sam), first)
            await sam.lease.wait_until_fresh()
            async with peer(swarm, ANN, tmp_path) as ann:
                assert ann.follower.term == 1, "so it fell asleep"
                await all_hold((ann,), first)
                assert ann.follower == ben.follower
                assert ann.store.archive.journal.follower.leader == BEN.public
            nursery.cancel_scope.cancel()


async def test_without_a_majority_nobody_leads_and_with_it_again_somebody_does(tmp_path, autojump_clock):
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ben, val = [await stack.enter_async_context(peer(swarm, who, tmp_path)) for who in (BEN, VAL)]
        async with peer(swarm, ANN, tmp_path) as ann:
            head = await ann.publish()
            await all_hold((ben, val), head)
        swarm.partition([BEN.public])
        await ben.lease.wait_until_over()
        with trio.move_on_after(10 * LEASE):
            await ben.candidate.stand()
        assert ben.follower.term == 1
        assert ben.votes.voted(2) is None, "its own vote is given last"
        swarm.heal()
        assert await ben.candidate.stand()
        await val.reach(lambda now: now.term == 2)


async def ordered_to_lead(who, *, deadline):
    """What an operator's word leads to, once the leader has been silent for a whole lease. Whether
    it leads then.
    """
    with trio.move_on_after(deadline):
        await who.lease.wait_until_over()
        await who.candidate.stand(by_hand=True)
    return who.candidate.leads


@pytest.mark.parametrize(("electors", "others"), [((BEN,), ()), ((BEN, VAL), (VAL,)), ((VAL,), (VAL,))])
async def test_with_fewer_than_three_electors_nobody_leads_by_itself(
    tmp_path, autojump_clock, electors, others
):
    of = rules((ANN, BEN), electors)
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ben = await stack.enter_async_context(peer(swarm, BEN, tmp_path, of))
        async with peer(swarm, ANN, tmp_path, of) as ann:
            head = await ann.publish()
            await all_hold((ben,), head)
        await ben.lease.wait_until_over()
        assert not ben.candidate.may_stand_alone
        with pytest.raises(ConfigError) as caught:
            await ben.candidate.stand()
        assert "by hand" in str(caught.value)
        if others:
            assert not await ordered_to_lead(ben, deadline=5 * LEASE), "all of them must sign"
        for who in others:
            await stack.enter_async_context(peer(swarm, who, tmp_path, of))
        assert await ordered_to_lead(ben, deadline=20 * LEASE)
        assert ben.follower.term == 2


async def test_of_two_trainers_alone_either_is_promoted_when_the_other_is_gone_again_and_again(
    tmp_path, autojump_clock
):
    of = rules((ANN, BEN), (ANN, BEN))
    async with MemorySwarm() as swarm, peer(swarm, SAM, tmp_path, of) as sam:
        for term, (gone, next_one) in enumerate([(ANN, BEN), (BEN, ANN)] * 2, start=2):
            async with peer(swarm, next_one, tmp_path, of) as heir:
                async with peer(swarm, gone, tmp_path, of) as leader:
                    head = await leader.publish()
                    await all_hold((heir, sam), head)
                    assert not await leader.candidate.stand(by_hand=True), "it is the other's turn"
                assert await ordered_to_lead(heir, deadline=20 * LEASE)
                assert (heir.follower.term, heir.follower.leader) == (term, next_one.public)
                await sam.reach(lambda now, term=term: now.term == term)


async def test_a_candidate_gives_up_when_another_is_granted_the_term(tmp_path, autojump_clock):
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    async with MemorySwarm() as swarm, peer(swarm, BEN, tmp_path, of) as ben:
        async with peer(swarm, ANN, tmp_path, of) as ann:
            head = await ann.publish()
            await all_hold((ben,), head)
        await ben.lease.wait_until_over()
        stood = []

        async def stand():
            stood.append(await ben.candidate.stand())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand)
            await trio.sleep(LEASE)
            vote = TermVote(base=head.id, leader=CAT.public, term=2)
            await ben.chain.take_grant(granted(vote, CAT, VAL, WIN))
        assert stood == [False]
        assert ben.follower.leader == CAT.public


async def test_a_candidate_that_starts_again_asks_for_the_same(tmp_path, autojump_clock):
    """It has voted for itself, and then the process ended before there was a grant."""
    async with MemorySwarm() as swarm:
        async with peer(swarm, BEN, tmp_path) as ben, peer(swarm, ANN, tmp_path) as ann:
            first = await ann.publish()
            await all_hold((ben,), first)
            vote = TermVote(base=first.id, leader=BEN.public, term=2)
            ben.votes.vote(ben.follower, vote, lease_over=True)
            second = await ann.publish()
            await all_hold((ben,), second)
        swarm.partition([VAL.public])  # so that it does not hear of the second
        async with peer(swarm, BEN, tmp_path) as ben, peer(swarm, VAL, tmp_path) as val:
            assert ben.follower.tip.id == second.id
            await val.chain.take_head(first.sealed)
            await val.lease.wait_until_over()
            val.chain.ask_around = _nothing
            swarm.heal()
            assert await ben.candidate.stand()
            assert ben.follower.tip.id == first.id, "what it had voted for"


async def test_votes_of_one_term_do_not_count_in_another(tmp_path, autojump_clock):
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ben, val, win = [
            await stack.enter_async_context(peer(swarm, who, tmp_path, of)) for who in (BEN, VAL, WIN)
        ]
        async with peer(swarm, ANN, tmp_path, of) as ann:
            head = await ann.publish()
            await all_hold((ben, val, win), head)
        for term in (2, 4):
            for each in (ben, val, win):
                await each.lease.wait_until_over()
            with trio.fail_after(LEASE):
                assert await ben.candidate.stand()
            grant = ben.follower.grants[-1]
            assert grant.vote == TermVote(base=head.id, leader=BEN.public, term=term)
            assert len(grant.ballots) == 3
            for each in (val, win):
                await each.reach(lambda now, term=term: now.term == term)
            vote = TermVote(base=head.id, leader=CAT.public, term=term + 1)
            for each in (ben, val, win):
                await each.chain.take_grant(granted(vote, CAT, VAL, WIN))


async def test_a_candidate_asks_neither_itself_nor_an_elector_that_was_revoked(
    tmp_path, autojump_clock, monkeypatch
):
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ann, ben, val, win = [
            await stack.enter_async_context(peer(swarm, who, tmp_path, of)) for who in (ANN, BEN, VAL, WIN)
        ]
        for _ in range(2):
            head = await ann.publish()
        await all_hold((ben, val, win), head)
        twin = head_after(ben.follower, ANN, tip=ben.follower.heads[0])
        for each in (ben, val, win):
            await each.chain.take_head(twin.sealed)
            assert each.follower.revoked == {ANN.public}
            await each.lease.wait_until_over()
        asked, ask = [], ben.candidate._ask
        monkeypatch.setattr(ben.candidate, "_ask", lambda who, vote: (asked.append(who), ask(who, vote))[1])
        assert await ben.candidate.stand()
        assert set(asked) == {CAT.public, VAL.public, WIN.public}


async def test_electors_that_never_answer_count_for_five_rounds_and_then_no_longer(tmp_path, autojump_clock):
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    async with MemorySwarm() as swarm, peer(swarm, BEN, tmp_path, of) as ben:
        async with peer(swarm, ANN, tmp_path, of) as ann:
            await all_hold((ben,), await ann.publish())
        await ben.lease.wait_until_over()
        can_win, candidate = [], ben.candidate
        with trio.move_on_after(sum(PAUSES) + 10):
            await candidate.stand()
        for candidate._rounds in (STEADFAST, STEADFAST + 1):
            can_win.append(candidate._can_win())
        assert can_win == [True, False]


async def test_a_ballot_without_its_electors_signature_does_not_count(tmp_path, autojump_clock):
    async def lie(_peer, _question):
        return encode(VoteAnswer(refusal=None, signature=bytes(64)))

    async with MemorySwarm() as swarm, peer(swarm, BEN, tmp_path) as ben, swarm.join(VAL) as val:
        async with peer(swarm, ANN, tmp_path) as ann:
            await all_hold((ben,), await ann.publish())
        await ben.lease.wait_until_over()
        with val.serve(topics.VOTE_STREAM, lie, most=limits.VOTE_BYTES), trio.move_on_after(LEASE):
            await ben.candidate.stand()
        assert ben.follower.term == 1
        assert VAL.public not in ben.candidate._ballots


@pytest.mark.parametrize("rival", [False, True], ids=["alone", "a trainer named before stands too"])
async def test_an_election_takes_one_round_and_five_more_to_give_way(tmp_path, autojump_clock, rival):
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    async with MemorySwarm() as swarm, AsyncExitStack() as stack:
        ben, cat, val, win = [
            await stack.enter_async_context(peer(swarm, who, tmp_path, of)) for who in (BEN, CAT, VAL, WIN)
        ]
        async with peer(swarm, ANN, tmp_path, of) as ann:
            head = await ann.publish()
            await all_hold((ben, cat, val, win), head)
        for each in (ben, cat, val, win):
            await each.lease.wait_until_over()
        if rival:
            ben.server.set_candidacy(2)
        rounds = STEADFAST if rival else 0
        begun = trio.current_time()
        assert await cat.candidate.stand()
        assert cat.candidate._rounds == rounds + 1
        waited = sum(PAUSES[:rounds])
        assert 0.5 * waited <= trio.current_time() - begun < 1.5 * waited + 0.1


async def _nothing(_peers=()):
    return False


async def strive(node, luck) -> None:
    """Stand until somebody leads, and lead a little."""
    while node.follower.term == 1:
        await node.lease.wait_until_over()
        if await node.candidate.stand():
            for _ in range(3):
                await node.publish()
                await trio.sleep(luck.uniform(0, 5))


def check_agreement(nodes) -> None:
    """Nobody has ever followed another head at one place, and each term has one leader."""
    chains: dict[tuple[int, int], bytes] = {}
    leaders: dict[int, bytes] = {}
    for node in nodes:
        for head in node.store.archive.journal.known.values():
            place = head.message.term, head.message.version
            assert chains.setdefault(place, head.id) == head.id
        for grant in node.follower.grants:
            assert leaders.setdefault(grant.vote.term, grant.vote.leader) == grant.vote.leader
        assert not node.follower.revoked


def all_votes_are_spent(nodes) -> bool:
    """Whether no candidate can have a majority any more, whoever answers whom."""
    rules = nodes[0].follower.rules
    electors = [node for node in nodes if node.identity.public in rules.electors]
    votes = Counter(vote for node in electors if (vote := node.votes._elector.voted.get(2)))
    unspent = len(electors) - votes.total()
    return max(votes.values(), default=0) + unspent < rules.majority_of(2)


async def contend(seed: int, folder) -> None:
    """Two candidates and four electors in bad weather; then everybody meets, and must agree."""
    luck = random.Random(seed)
    of = rules((ANN, BEN, CAT), (ANN, BEN, CAT, VAL, WIN))
    people = (BEN, CAT, VAL, WIN, SAM)
    async with (
        MemorySwarm(seed, loss=0.2, delay=(0.0, 2.0), duplicate=0.1, reorder=0.2) as swarm,
        AsyncExitStack() as stack,
    ):
        nodes = [await stack.enter_async_context(peer(swarm, who, folder, of)) for who in people]
        ben, cat = nodes[:2]
        async with peer(swarm, ANN, folder, of) as ann:
            for _ in range(luck.randint(1, 3)):
                head = await ann.publish()
                await trio.sleep(luck.uniform(0, 3))
            with trio.move_on_after(5 * LEASE):
                await all_hold((ben, cat), head)

        async with trio.open_nursery() as nursery:
            for node in (ben, cat):
                nursery.start_soon(strive, node, luck)
            for _ in range(4):
                swarm.partition([who.public for who in people if luck.random() < 0.5])
                await trio.sleep(luck.uniform(0, LEASE))
            swarm.heal()
            with trio.move_on_after(20 * LEASE):
                await ben.reach(lambda now: now.term == 2)
                await cat.reach(lambda now: now.term == 2)
            if ben.follower.term == cat.follower.term == 1:
                nursery.cancel_scope.cancel()
        check_agreement(nodes)
        if ben.follower.term == 1:
            assert all_votes_are_spent(nodes), "somebody could have led"
            return
        newest = max(ben.follower.heads[-1], cat.follower.heads[-1], key=order)
        await all_hold(nodes, newest)
        check_agreement(nodes)


@pytest.mark.parametrize("seed", range(6))
async def test_of_two_that_stand_at_once_one_leads_at_most_and_nobody_follows_two_chains(
    tmp_path, autojump_clock, seed
):
    await contend(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6, 150))
async def test_in_any_weather_nobody_follows_two_chains(tmp_path, autojump_clock, seed):
    await contend(seed, tmp_path)
