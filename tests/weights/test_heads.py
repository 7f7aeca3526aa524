"""Heads for those who missed some."""

from __future__ import annotations

import pytest

from echo_node.weights import heads as room
from echo_node.weights.heads import ANSWER_BYTES, MOST_HEADS, HeadServer, read_heads
from protocol import ZERO, ProtocolError, canonical, limits
from tests.weights.chains import FOLLOWER, publish


async def ask(server: HeadServer, newest: bytes) -> list[bytes]:
    return read_heads(await server.serve(FOLLOWER.public, newest))


async def test_newcomers_get_all_heads_and_others_what_follows_theirs():
    chain = [made.head for made in publish(5)]
    server = HeadServer(chain)
    assert await ask(server, ZERO) == [head.sealed for head in chain]
    assert await ask(server, chain[2].id) == [chain[3].sealed, chain[4].sealed]
    assert await ask(server, chain[4].id) == []
    assert await ask(HeadServer([]), ZERO) == []


async def test_heads_that_are_announced_later_are_served_too():
    announced = []
    server = HeadServer(announced)
    for made in publish(3):
        announced.append(made.head)
        assert (await ask(server, ZERO))[-1] == made.head.sealed


async def test_an_answer_has_at_most_so_many_heads(monkeypatch):
    monkeypatch.setattr(room, "MOST_HEADS", 3)
    chain = [made.head for made in publish(7)]
    server = HeadServer(chain)
    assert await ask(server, ZERO) == [head.sealed for head in chain[:3]]
    assert await ask(server, chain[2].id) == [head.sealed for head in chain[3:6]]
    assert await ask(server, chain[5].id) == [chain[6].sealed]


@pytest.mark.parametrize("newest", [b"", b"x", b"n" * 32])
async def test_whoever_follows_another_chain_is_told_so(newest):
    with pytest.raises(ProtocolError, match="does not know that head"):
        await HeadServer([made.head for made in publish(2)]).serve(FOLLOWER.public, newest)


def test_the_largest_heads_that_there_can_be_fit_into_one_answer():
    longest = b"h" * (limits.HEAD_BYTES + limits.ENVELOPE_BYTES)
    answer = canonical.encode([longest] * MOST_HEADS, most=ANSWER_BYTES)
    assert read_heads(answer) == [longest] * MOST_HEADS


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xff",
        canonical.encode({"heads": []}),
        canonical.encode(b"head"),
        canonical.encode(None),
        canonical.encode(["head"]),
        canonical.encode([b"head", 1]),
        canonical.encode([b""] * (MOST_HEADS + 1)),
        canonical.encode([b"x" * ANSWER_BYTES]),
    ],
)
def test_an_answer_that_is_no_list_of_heads_is_refused(answer):
    with pytest.raises(ProtocolError):
        read_heads(answer)
