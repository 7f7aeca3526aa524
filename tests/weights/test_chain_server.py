"""Heads for those who missed some."""

from __future__ import annotations

import dataclasses
import time

import pytest

from echo_node.weights.chain_server import HeadServer
from protocol import HeadsAnswer, HeadsQuestion, ProtocolError, decode, encode, limits
from tests.weights.keys import FOLLOWER
from tests.weights.test_route_graph import head, name

CHAIN = [dataclasses.replace(head(n, [(None, 1)]), sealed=name(f"head {n}")) for n in range(7)]
"""Heads whose bytes tell them apart."""


def sealed(heads):
    return tuple(each.sealed for each in heads)


async def ask(server: HeadServer, *held: bytes) -> tuple[bytes, ...]:
    return decode(HeadsAnswer, await server.serve(FOLLOWER.public, encode(HeadsQuestion(held)))).heads


async def test_newcomers_get_all_heads_and_others_what_follows_theirs():
    server = HeadServer(lambda: CHAIN)
    assert await ask(server) == sealed(CHAIN)
    assert await ask(server, CHAIN[2].id) == sealed(CHAIN[3:])
    assert await ask(server, CHAIN[6].id) == ()
    assert await ask(HeadServer(list)) == ()


async def test_whoever_left_the_chain_is_sent_what_follows_the_place_where_it_did():
    server = HeadServer(lambda: CHAIN)
    assert await ask(server, name("a fork"), name("its second"), CHAIN[4].id, CHAIN[0].id) == sealed(
        CHAIN[5:]
    )


async def test_heads_that_are_taken_later_are_served_too_and_those_that_were_left_are_not():
    held = CHAIN[:1]
    server = HeadServer(lambda: held)
    for each in CHAIN[1:]:
        held = [*held, each]
        assert (await ask(server, CHAIN[0].id))[-1] == each.sealed
    held = CHAIN[:3]
    with pytest.raises(ProtocolError, match="does not know"):
        await ask(server, CHAIN[5].id)
    assert await ask(server, CHAIN[5].id, CHAIN[1].id) == sealed(CHAIN[2:3])


async def test_a_chain_that_begins_at_a_link_is_served_from_there():
    server = HeadServer(lambda: CHAIN[3:])
    assert await ask(server) == sealed(CHAIN[3:])
    assert await ask(server, CHAIN[4].id) == sealed(CHAIN[5:])
    with pytest.raises(ProtocolError, match="does not know"):
        await ask(server, CHAIN[1].id)


async def test_an_answer_has_at_most_so_many_heads(monkeypatch):
    monkeypatch.setattr(limits, "CHAIN_HEADS", 3)
    server = HeadServer(lambda: CHAIN)
    assert await ask(server) == sealed(CHAIN[:3])
    assert await ask(server, CHAIN[2].id) == sealed(CHAIN[3:6])
    assert await ask(server, CHAIN[5].id) == sealed(CHAIN[6:])


@pytest.mark.parametrize("question", [b"", b"x", b"n" * 32])
async def test_a_question_of_another_form_is_refused(question):
    with pytest.raises(ProtocolError):
        await HeadServer(lambda: CHAIN).serve(FOLLOWER.public, question)


async def test_a_question_costs_the_same_however_long_the_chain_is():
    """The index is built once, and a question looks at what it names and at what it answers."""
    long = [dataclasses.replace(head(n, [(None, 1)]), sealed=b"s") for n in range(20_000)]
    server = HeadServer(lambda: long)
    await ask(server, long[-1].id)
    began = time.perf_counter()
    for _ in range(100):
        await ask(server, long[-2].id)
    assert time.perf_counter() - began < 1.0
