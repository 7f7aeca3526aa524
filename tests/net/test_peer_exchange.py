"""Peer exchange: what is told, to whom, and what a poisoned answer can do, which is little."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from echo_node.net.base import RequestError
from echo_node.net.discovery import dial_queue as candidates_module
from echo_node.net.discovery.address_scope import Scope, scope
from echo_node.net.discovery.dial_queue import DialQueue, Source
from echo_node.net.discovery.dialer import DIALS
from echo_node.net.discovery.peer_exchange import (
    ANSWER_EVERY,
    PeerExchange,
    PeerExchangeError,
    PeerExchangeSchedule,
)
from echo_node.net.request_response import RequestResponse
from echo_node.net.swarm import id_of
from protocol import Identity, PeerPlace, PeersAnswer, PeersQuestion, decode, encode, limits
from protocol.topics import PEERS_STREAM
from tests.net.discovery_nodes import searching, until

ME, ASKER = Identity(b"m" * 32).public, Identity(b"a" * 32).public
OTHERS = [Identity(n.to_bytes(32)).public for n in range(1, 200)]
EVERYWHERE, NEAR, SELF = "/ip4/8.8.8.8/tcp/4001", "/ip4/192.168.1.5/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
QUESTION = encode(PeersQuestion(limits.PEERS))


def exchange(dialable, least=Scope.LOOPBACK):
    return PeerExchange(ME, None, lambda: dialable, lambda _peer: least)


async def told(dialable, least=Scope.LOOPBACK, wanted=limits.PEERS):
    answer = await exchange(dialable, least).respond(ASKER, encode(PeersQuestion(wanted)))
    return {place.key: place.addresses for place in decode(PeersAnswer, answer).peers}


async def test_private_addresses_are_told_only_to_those_in_a_private_network():
    dialable = {OTHERS[0]: [EVERYWHERE, NEAR, SELF], OTHERS[1]: [SELF], OTHERS[2]: [NEAR]}
    assert await told(dialable, Scope.PUBLIC) == {OTHERS[0]: (EVERYWHERE,)}
    assert await told(dialable, Scope.PRIVATE) == {OTHERS[0]: (EVERYWHERE, NEAR), OTHERS[2]: (NEAR,)}
    assert (await told(dialable, Scope.LOOPBACK))[OTHERS[0]] == (EVERYWHERE, NEAR, SELF)


async def test_neither_the_asker_nor_oneself_is_told():
    assert await told({ASKER: [EVERYWHERE], ME: [EVERYWHERE]}) == {}


async def test_no_more_are_told_than_are_wanted_and_not_always_the_same():
    dialable = {key: [EVERYWHERE] for key in OTHERS}
    assert len(await told(dialable)) == limits.PEERS
    assert len(await told(dialable, wanted=3)) == 3
    assert len({frozenset(await told(dialable, wanted=3)) for _ in range(20)}) > 1


async def test_the_longest_answer_fits():
    longest = (
        "/ip6/" + "2001:0db8:85a3:0000:0000:8a2e:0370:7334" + "/tcp/65535/p2p/" + "1" * 52 + "/p2p-circuit"
    )
    addresses = tuple(
        "/" + str(index) + "a" * (limits.ADDRESS_BYTES - 2) for index in range(limits.PEER_ADDRESSES)
    )
    full = PeersAnswer(tuple(PeerPlace(key, addresses) for key in sorted(OTHERS[: limits.PEERS])))
    assert len(encode(full)) <= limits.PEERS_ANSWER_BYTES
    assert scope(longest) is not Scope.NOWHERE


async def test_who_asks_again_at_once_is_refused(autojump_clock):  # noqa: ARG001 - it turns the clock
    talk = exchange({})
    await talk.respond(ASKER, QUESTION)
    with pytest.raises(PeerExchangeError, match="one request every"):
        await talk.respond(ASKER, QUESTION)
    await trio.sleep(ANSWER_EVERY)
    await talk.respond(ASKER, QUESTION)


async def test_a_teller_whose_peers_are_all_dead_is_asked_last():
    liar, honest = OTHERS[:2]
    schedule = PeerExchangeSchedule(
        exchange({}), DialQueue(ME, lambda: 0.0), lambda _teller, _peer, ways: ways
    )
    assert set(schedule.order([liar, honest], now=1.0)) == {liar, honest}
    schedule._referrers[liar].named = 2
    schedule.count_dead(liar)
    assert set(schedule.order([liar, honest], now=1.0)) == {liar, honest}, "one of two may still be alive"
    schedule.count_dead(liar)
    assert schedule.order([liar, honest], now=1.0) == [honest]
    assert schedule.order([liar], now=1.0) == [liar], "last is not never"


# a teller that lies, on real hosts


@asynccontextmanager
async def liar_and_victim(answer, **options):
    """A node whose only peer tells it what `answer` gives. Yields both."""
    async with searching() as liar:
        liar.discovery._exchange.respond = answer  # before it serves: its task has not begun
        async with searching(seeds=[liar.seed], **options) as node:
            await until(lambda: liar.public in node.peers())
            yield liar, node


def saying(places):
    """A handler that tells these peers, and counts."""

    async def answer(_asker, _question):
        await trio.lowlevel.checkpoint()
        answer.asked += 1
        return encode(PeersAnswer(tuple(sorted(places(), key=lambda place: place.key))))

    answer.asked = 0
    return answer


@asynccontextmanager
async def counting_victim():
    """A bystander on loopback that is no node, and counts who knocks."""
    knocks = []
    async with trio.open_nursery() as nursery:

        async def take(stream):
            knocks.append(trio.current_time())
            await stream.aclose()

        (listener,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), take, 0)
        yield f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}", knocks
        nursery.cancel_scope.cancel()


async def test_many_names_for_one_address_are_not_many_dials_of_it():
    async with counting_victim() as (victim, knocks):
        fakes = [PeerPlace(key, (victim,)) for key in OTHERS[: limits.PEERS]]
        answer = saying(lambda: fakes)
        async with liar_and_victim(answer) as (_, node):
            await until(lambda: knocks)
            await until(lambda: answer.asked >= 2)
            assert len(knocks) <= 2, "32 peers at one address, and it was dialled once, perhaps twice"
            assert not set(OTHERS) & {entry.public for entry in node.book}, "nobody of them is good"


async def test_ten_thousand_addresses_cost_little_and_leave_nothing():
    fresh = iter(range(1_000_000))

    def more():
        keys = [Identity((10_000 + next(fresh)).to_bytes(32)).public for _ in range(limits.PEERS)]
        return [
            PeerPlace(
                key,
                tuple(
                    f"/ip4/127.0.0.1/tcp/{1_024 + next(fresh) % 1000}" for _ in range(limits.PEER_ADDRESSES)
                ),
            )
            for key in keys
        ]

    dialling = []
    async with liar_and_victim(saying(more)) as (liar, node):
        schedule, discovery = node.discovery._schedule, node.discovery
        await until(lambda: liar.public in schedule._referrers)
        for _ in range(10_000 // (limits.PEERS * limits.PEER_ADDRESSES) + 1):
            schedule._referrers[liar.public].due = 0.0
            told_before = schedule._referrers[liar.public].named
            await until(lambda before=told_before: schedule._referrers[liar.public].named > before, 20)
            dialling.append(len(discovery._dialling))
        assert max(dialling) <= DIALS
        assert len(discovery._queue) <= candidates_module.PER_REFERRER + 1
        assert liar.public in node.peers(), "what works stays"
        assert {entry.public for entry in node.book} <= {liar.public}
        await until(lambda: discovery.counts["failed"] > 20, 20)
        assert len(node.host.get_peerstore().peer_ids()) < 40, "failed dials leave nothing in libp2p's store"


async def test_wrong_ids_own_ids_and_rubbish_reach_nobody():
    async with searching() as bystander:

        def lies():
            wrong = PeerPlace(OTHERS[0], (bystander.address,))
            nowhere = PeerPlace(
                OTHERS[1], ("/ip4/0.0.0.0/tcp/1", "/dns4/victim.example/tcp/80", "/x", "/ip4/224.0.0.1/tcp/1")
            )
            return [wrong, nowhere, PeerPlace(node_key[0], (bystander.address,))]

        node_key = [OTHERS[2]]
        answer = saying(lies)
        async with liar_and_victim(answer) as (_, node):
            node_key[0] = node.public
            await until(lambda: answer.asked >= 2)
            await until(lambda: node.discovery.counts["failed"] >= 1)
            known = node.discovery.known()
            assert node.public not in known
            assert OTHERS[1] not in known
            assert OTHERS[0] not in node.peers()
            assert not {OTHERS[0], OTHERS[1]} & {entry.public for entry in node.book}
            assert bystander.public not in node.peers()


def test_loopback_addresses_that_a_remote_peer_tells_are_not_taken():
    pool = DialQueue(ME, lambda: 0.0)
    assert not pool.add(OTHERS[0], [SELF, NEAR], Source.REFERRED, least=Scope.PUBLIC)
    assert pool.add(OTHERS[0], [SELF, EVERYWHERE], Source.REFERRED, least=Scope.PUBLIC)
    assert next(iter(pool)).addresses == (EVERYWHERE,)


async def test_an_answer_that_is_none_makes_a_silent_teller_and_no_more():
    async def rubbish(_asker, _question):
        await trio.lowlevel.checkpoint()
        rubbish.asked += 1
        return b"\xc1" * 1000

    rubbish.asked = 0
    async with liar_and_victim(rubbish) as (liar, node):
        await until(lambda: rubbish.asked and node.discovery._schedule._referrers[liar.public].is_silent)
        assert liar.public in node.peers()


async def test_a_question_that_is_none_is_refused_and_the_next_is_answered():
    async with searching() as node, searching(seeds=[node.seed]) as asker:
        await until(lambda: node.public in asker.peers())
        asking = RequestResponse(asker.host, Counter())
        for rubbish in (
            b"",
            b"\xc1",
            encode(PeersQuestion(1))[:-1],
            b"x" * (limits.PEERS_QUESTION_BYTES + 1),
        ):
            with pytest.raises(RequestError):
                await asking.request(node.public, PEERS_STREAM, rubbish, limits.PEERS_ANSWER_BYTES)
        assert id_of(node.public) in asker.host.get_connected_peers()


# candidates, by themselves


def test_hearsay_never_changes_what_is_known_better():
    pool = DialQueue(ME, lambda: 0.0)
    pool.add(OTHERS[0], [NEAR], Source.SEED)
    assert not pool.add(OTHERS[0], [EVERYWHERE], Source.REFERRED)
    assert next(iter(pool)).addresses == (NEAR,)


def test_a_flood_of_hearsay_pushes_no_seed_out():
    pool = DialQueue(ME, lambda: 0.0, most=10)
    pool.add(OTHERS[0], [NEAR], Source.SEED)
    for key in OTHERS[1:]:
        pool.add(key, [EVERYWHERE], Source.REFERRED)
    assert len(pool) == 10
    assert OTHERS[0] in pool
    assert pool.add(ASKER, [NEAR], Source.LAN), "and what is better finds room"
    assert len(pool) == 10


def test_one_loud_teller_leaves_room_for_the_others():
    pool = DialQueue(ME, lambda: 0.0, most=20)
    for key in OTHERS[:5]:
        pool.add(key, [EVERYWHERE], Source.REFERRED, referrer=ASKER)
    for key in OTHERS[5:]:
        pool.add(key, [EVERYWHERE], Source.REFERRED, referrer=OTHERS[0])
    assert len(pool) == 20
    assert all(key in pool for key in OTHERS[:5]), "what another told stays"
    assert pool.add(OTHERS[100], [EVERYWHERE], Source.REFERRED, referrer=ASKER), "and it may tell more"
    assert all(key in pool for key in OTHERS[:5])


def test_pauses_grow_to_a_cap_and_no_two_are_the_same():
    now = [0.0]
    pool = DialQueue(ME, lambda: now[0])
    pool.add(OTHERS[0], [NEAR], Source.SEED)
    pauses = []
    for _ in range(40):
        assert pool.next(()) is not None
        pool.failed(OTHERS[0])
        pauses.append(pool.due(()) - now[0])
        assert pool.next(()) is None
        now[0] = pool.due(())
    assert pauses[0] <= 1.0
    assert max(pauses) <= Source.SEED.cap(alone=False)
    assert min(pauses[10:]) >= Source.SEED.cap(alone=False) / 2
    assert len(set(pauses)) == len(pauses)


def test_hearsay_is_let_go_after_three_failures_and_its_teller_is_named():
    now = [0.0]
    pool = DialQueue(ME, lambda: now[0])
    pool.add(OTHERS[0], [EVERYWHERE], Source.REFERRED, referrer=ASKER)
    assert pool.failed(OTHERS[0]) is None
    assert pool.failed(OTHERS[0]) is None
    assert pool.failed(OTHERS[0]).referrer == ASKER
    assert len(pool) == 0


def test_who_was_lost_for_long_is_no_longer_looked_for_first_but_a_seed_stays_one():
    now = [0.0]
    pool = DialQueue(ME, lambda: now[0])
    pool.add(OTHERS[0], [NEAR], Source.SEED)
    for key in OTHERS[:2]:
        pool.add(key, [NEAR], Source.LOST)
    assert pool.next((), Source.LOST) is not None
    now[0] = candidates_module.LOST_SECONDS + 1
    pool.next(())
    assert pool.source_of(OTHERS[0]) is Source.SEED
    assert pool.source_of(OTHERS[1]) is Source.BOOK
