"""What travels on streams, as SPEC.md says it."""

import re

import pytest

from echo_node.weights.heads import ANSWER_BYTES, MOST_HEADS, read_heads
from protocol import ProtocolError, canonical, topics

from .examples import SEALED_HEAD_ZERO
from .idl import SPEC


def test_an_answer_of_heads_is_bounded_and_nothing_else():
    assert read_heads(canonical.encode([])) == []
    assert read_heads(canonical.encode([SEALED_HEAD_ZERO] * MOST_HEADS)) == [SEALED_HEAD_ZERO] * MOST_HEADS
    for bad in (
        canonical.encode([SEALED_HEAD_ZERO] * (MOST_HEADS + 1)),
        canonical.encode([SEALED_HEAD_ZERO, None]),
        canonical.encode({"heads": []}),
        canonical.encode([SEALED_HEAD_ZERO])[:-1],
        canonical.encode([SEALED_HEAD_ZERO]) + b"\xc0",
        canonical.pack([bytes(ANSWER_BYTES)]),
        b"",
    ):
        with pytest.raises(ProtocolError):
            read_heads(bad)


def test_every_stream_says_what_travels_on_it():
    section = SPEC.read_text().split("## topics")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(/echo/\w+/1)` \| \S", section, re.MULTILINE)) == set(topics.STREAMS)
    assert f"at most {MOST_HEADS} byte strings" in section
    assert f"at most {ANSWER_BYTES} bytes" in section
