"""The frames of GossipSub: round trips, limits, and noise."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.net.gossip.wire import (
    BYTES_A_MESSAGE,
    CONTROLS,
    FRAME_BYTES,
    ID_BYTES,
    IDS,
    MESSAGES,
    SUBSCRIPTIONS,
    TOPIC_BYTES,
    Control,
    Frame,
    GossipError,
    Published,
    read_frame,
    take_frames,
    write_frame,
    write_length,
)
from protocol import limits

topics = st.text(min_size=1, max_size=TOPIC_BYTES // 4)
ids = st.lists(st.binary(max_size=ID_BYTES), max_size=5)
controls = st.builds(
    Control,
    graft=st.lists(topics, max_size=4),
    prune=st.lists(st.tuples(topics, st.integers(0, 3600)), max_size=4),
    have=st.lists(st.tuples(topics, ids), max_size=4),
    want=ids,
)
frames = st.builds(
    Frame,
    subscriptions=st.lists(st.tuples(topics, st.booleans()), max_size=4),
    published=st.lists(st.builds(Published, topics, st.binary(max_size=200)), max_size=4),
    control=controls,
)


def written(frame):
    return write_frame(subscriptions=frame.subscriptions, published=frame.published, control=frame.control)


def body(**parts):
    (found,) = take_frames(bytearray(write_frame(**parts)))
    return found


def field(number, data):
    """A protobuf field of bytes."""
    return write_length(number << 3 | 2) + write_length(len(data)) + data


@given(frames)
def test_a_frame_comes_back_as_it_was(frame):
    (found,) = take_frames(bytearray(written(frame)))
    assert read_frame(found) == frame


@given(st.lists(frames, max_size=4), st.data())
def test_frames_are_found_however_the_bytes_are_cut(sent, data):
    stream = b"".join(map(written, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    buffer, found = bytearray(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer += stream[start:end]
        found += take_frames(buffer)
    assert [read_frame(each) for each in found] == sent
    assert not buffer


def test_what_a_signed_message_says_of_its_author_is_left_out():
    message = b"".join(
        field(n, each)
        for n, each in ((1, b"author"), (2, b"data"), (3, b"number"), (4, b"topic"), (5, b"seal"))
    )
    assert read_frame(field(2, message)).published == [Published("topic", b"data")]


def test_fields_of_later_versions_are_passed_over():
    idontwant = field(5, field(1, b"an id"))
    peers = field(2, field(1, b"a peer"))
    prune = field(4, field(1, b"topic") + peers)
    assert read_frame(field(3, idontwant + prune)).control == Control(prune=[("topic", 0)])


@pytest.mark.parametrize(
    "parts",
    [
        {"subscriptions": [("t", True)] * (SUBSCRIPTIONS + 1)},
        {"published": [Published("t", b"")] * (MESSAGES + 1)},
        {"published": [Published("t", bytes(limits.GOSSIP_BYTES + 1))]},
        {"control": Control(graft=["t"] * (CONTROLS + 1))},
        {"control": Control(prune=[("t", 1)] * (CONTROLS + 1))},
        {"control": Control(have=[("t", [])] * (CONTROLS + 1))},
        {"control": Control(have=[("t", [b""] * (IDS + 1))])},
        {"control": Control(want=[b""] * (IDS + 1))},
        {"control": Control(want=[bytes(ID_BYTES + 1)])},
        {"subscriptions": [("", True)]},
        {"subscriptions": [("t" * (TOPIC_BYTES + 1), True)]},
    ],
    ids="-".join,
)
def test_one_more_than_the_bound_is_refused(parts):
    with pytest.raises(GossipError):
        read_frame(body(**parts))


def test_as_much_as_the_bound_is_taken():
    control = Control(graft=["t"] * CONTROLS, want=[bytes(ID_BYTES)] * IDS)
    assert read_frame(body(control=control)).control == control
    whole = Published("t" * TOPIC_BYTES, bytes(limits.GOSSIP_BYTES))
    assert read_frame(body(published=[whole])).published == [whole]


def test_wants_of_several_parts_share_one_bound():
    part = field(2, field(1, b"an id") * (IDS // 2 + 1))
    with pytest.raises(GossipError):
        read_frame(field(3, part + part))


def test_a_prune_lasts_an_hour_at_most():
    control = Control(prune=[("t", 2**63)])
    assert read_frame(body(control=control)).control.prune == [("t", 3600)]


def test_a_topic_that_is_no_text_is_refused():
    with pytest.raises(GossipError):
        read_frame(field(1, field(2, b"\xff")))


@pytest.mark.parametrize("length", [write_length(FRAME_BYTES + 1), b"\xff" * 5, b"\x80" * 9], ids=bytes.hex)
def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come(length):
    with pytest.raises(GossipError):
        take_frames(bytearray(length))


def test_a_length_that_has_not_all_come_is_waited_for():
    buffer = bytearray(b"\x80\x80")
    assert take_frames(buffer) == []
    assert buffer == b"\x80\x80"


@given(st.binary(max_size=300))
def test_noise_is_a_frame_or_a_gossip_error(data):
    for decode in (read_frame, lambda data: take_frames(bytearray(data))):
        with contextlib.suppress(GossipError):
            decode(data)


@given(frames, st.data())
def test_a_frame_with_damage_is_a_frame_or_a_gossip_error(frame, data):
    (found,) = take_frames(bytearray(written(frame)))
    damaged = bytearray(found or b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(GossipError):
        read_frame(bytes(damaged))


def test_a_long_message_costs_as_much_as_several_short_ones():
    short = Frame(published=[Published("t", b"x")]).cost
    long = Frame(published=[Published("t", bytes(limits.GOSSIP_BYTES))]).cost
    assert long - short >= limits.GOSSIP_BYTES // BYTES_A_MESSAGE - 1
    assert short == pytest.approx(2, abs=0.01)
