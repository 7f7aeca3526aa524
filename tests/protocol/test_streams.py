"""What travels on streams, as SPEC.md says it."""

import re

import pytest

from protocol import (
    Ballot,
    GrantsAnswer,
    HeadsAnswer,
    HeadsQuestion,
    Identity,
    ProtocolError,
    ShownGrant,
    TermGrant,
    TermVote,
    VoteQuestion,
    canonical,
    decode,
    encode,
    limits,
    topics,
)

from .examples import SEALED_HEAD_ZERO, name
from .idl import SPEC


def test_an_answer_of_heads_is_bounded_and_nothing_else():
    for count in (0, 1, limits.CHAIN_HEADS):
        heads = (SEALED_HEAD_ZERO,) * count
        assert decode(HeadsAnswer, encode(HeadsAnswer(heads))).heads == heads
    one = canonical.encode({"heads": [SEALED_HEAD_ZERO]})
    for bad in (
        canonical.encode({"heads": [SEALED_HEAD_ZERO] * (limits.CHAIN_HEADS + 1)}),
        canonical.encode({"heads": [SEALED_HEAD_ZERO, None]}),
        canonical.encode({"heads": [b""]}),
        canonical.encode([SEALED_HEAD_ZERO]),
        one[:-1],
        one + b"\xc0",
        canonical.pack({"heads": [bytes(limits.HEADS_BYTES)]}),
        b"",
    ):
        with pytest.raises(ProtocolError):
            decode(HeadsAnswer, bad)


def test_the_largest_heads_that_there_can_be_fit_into_one_answer():
    longest = (b"h" * (limits.HEAD_BYTES + limits.ENVELOPE_BYTES),) * limits.CHAIN_HEADS
    assert decode(HeadsAnswer, encode(HeadsAnswer(longest))).heads == longest


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 1_000, 1_000_000])
def test_whoever_asks_names_its_newest_heads_then_fewer_and_its_oldest(count):
    ids = [name("0"), name("1"), name("2"), name("3")]
    heads = [*ids[:1], *([ids[1]] * max(0, count - 3)), *ids[2:]][:count] if count > 3 else ids[:count]
    question = HeadsQuestion.of(heads)
    assert decode(HeadsQuestion, encode(question)) == question
    assert len(question.held) <= min(count, limits.HELD_HEADS)
    assert question.held[:1] == tuple(heads[-1:])
    assert question.held[-1:] == tuple(heads[:1])
    if count <= limits.HELD_HEADS // 4:
        assert question.held == tuple(heads[::-1])


def test_every_stream_says_what_travels_on_it():
    section = SPEC.read_text().split("## topics")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(/echo/\w+/2)` \| \S", section, re.MULTILINE)) == set(topics.STREAMS)


def test_the_largest_grants_and_votes_that_there_can_be_fit_into_one_message():
    head = b"h" * (limits.HEAD_BYTES + limits.ENVELOPE_BYTES)
    keys = sorted(Identity(bytes([n]) * 32).public for n in range(limits.KEYS))
    vote = TermVote(base=name("base"), leader=keys[0], term=limits.SAFE_INTEGER, ext={"k": b"x" * 1018})
    grant = TermGrant(tuple(Ballot(key, bytes(64)) for key in keys), vote)
    assert len(encode(grant)) <= limits.GRANT_BYTES
    shown = (ShownGrant(grant, (head,) * limits.CHAIN_HEADS), *[ShownGrant(grant, ())] * (limits.GRANTS - 1))
    for largest in (GrantsAnswer(shown), VoteQuestion((head,) * limits.CHAIN_HEADS, vote)):
        assert decode(type(largest), encode(largest)) == largest
