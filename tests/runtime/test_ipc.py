"""The IPC pipe: values arrive unchanged, in bounded time, and garbage is one clear error."""

from __future__ import annotations

import pickle
import random
import threading

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.engine.base import Change, Draw, Finished, SamplingLimits, SlotRequest, Span, TensorBytes
from echo_node.engine.worker.serde import (
    PIECE_BYTES,
    pack_change,
    pack_finished,
    pack_ids,
    pack_request,
    pack_shape,
    pieces,
    unpack_change,
    unpack_finished,
    unpack_request,
    unpack_shape,
)
from echo_node.errors import EngineError
from echo_node.runtime import ipc as pipes
from echo_node.runtime.ipc import (
    MAX_MESSAGE_BYTES,
    MessageError,
    Pipe,
    PipeEndedError,
    PipeError,
    PipeSilentError,
    decode,
    encode,
    field,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
HEADER = 4


@pytest.fixture
def ends():
    ours, theirs = pipes.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@given(st.dictionaries(st.text(), PLAIN, max_size=5), st.text())
def test_a_message_comes_out_as_it_went_in(fields, kind):
    message = {**fields, "kind": kind}
    assert decode(encode(message)[HEADER:]) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_one_clear_error(data):
    try:
        message = decode(data)
    except PipeError:
        return
    assert type(message["kind"]) is str


def test_a_damaged_message_is_a_message_or_one_clear_error():
    whole = encode(
        {"kind": "finished", "ids": b"12345678", "spans": [[0, b"h" * 32]], "x": {"y": [1.5, None]}}
    )
    draws = random.Random(3)
    refused = 0
    for _ in range(3_000):
        damaged = bytearray(whole[HEADER:])
        for _ in range(draws.randint(1, 3)):
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        try:
            decode(damaged[: draws.randint(1, len(damaged))])
        except PipeError:
            refused += 1
    assert 1_000 < refused < 3_000


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(5, b"abc"),
        msgpack.Timestamp(1, 2),
        {1: "a key that is no text"},
        {b"bytes": 1},
        [[msgpack.ExtType(1, b"")]],
    ],
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(PipeError):
        decode(msgpack.packb({"kind": "x", "value": value}))


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb([1, 2]),
        msgpack.packb({"no": "kind"}),
        msgpack.packb({"kind": 7}),
        msgpack.packb({"kind": "x"}) + b"\xc0",
        b"\x91" * 5_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        pickle.dumps({"kind": "x"}),
    ],
    ids=["list", "nameless", "number", "trailing", "deep", "long-list", "pickle"],
)
def test_a_body_of_another_form_is_refused(body):
    with pytest.raises(PipeError):
        decode(body)


def test_types_of_fields_are_exact():
    message = {"kind": "x", "flag": True, "count": 3}
    assert field(message, "count", int) == 3
    with pytest.raises(PipeError, match="'flag' is a bool, not a int"):
        field(message, "flag", int)
    with pytest.raises(PipeError, match="'other' is a NoneType"):
        field(message, "other", bytes)


def test_a_message_that_comes_byte_by_byte_is_read_without_waiting(ends):
    ours, theirs = ends
    pipe = Pipe(ours)
    frame = encode({"kind": "slow", "data": b"x" * 10})
    for byte in frame[:-1]:
        theirs.send(bytes([byte]))
        assert pipe.receive(0) is None
    theirs.send(frame[-1:] + encode({"kind": "next"}))
    assert pipe.receive(0) == {"kind": "slow", "data": b"x" * 10}
    assert pipe.receive(0) == {"kind": "next"}
    assert pipe.receive(0.01) is None


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_a_message_of_a_forbidden_length_is_refused_at_its_first_four_bytes(ends, length):
    ours, theirs = ends
    theirs.send(length.to_bytes(4, "little"))
    with pytest.raises(PipeError, match=f"a message of {length} bytes"):
        Pipe(ours).receive(1)


def test_nobody_can_send_what_the_other_side_would_refuse(ends):
    pipe = Pipe(ends[0])
    with pytest.raises(MessageError, match="bytes, where"):
        pipe.send({"kind": "x", "data": bytes(MAX_MESSAGE_BYTES)})
    for value in (2**70, object(), "\ud800"):
        with pytest.raises(MessageError, match="cannot be sent"):
            pipe.send({"kind": "x", "value": value})
    pipe.send({"kind": "x"})
    assert Pipe(ends[1]).receive(1) == {"kind": "x"}


@pytest.mark.parametrize("cut", [0, 2, 4, 7])
def test_a_pipe_that_ends_says_so(ends, cut):
    ours, theirs = ends
    theirs.send(encode({"kind": "x", "y": 1})[:cut])
    theirs.close()
    with pytest.raises(PipeEndedError, match="in the middle of a message" if cut else "by the other side"):
        Pipe(ours).receive(1)


def test_sending_to_nobody_says_so(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(PipeEndedError):
        Pipe(ours).send({"kind": "x"})


def test_a_side_that_never_reads_is_silent(ends):
    with pytest.raises(PipeSilentError, match=r"nothing could be sent for 0\.05 seconds"):
        Pipe(ends[0]).send({"kind": "x", "data": bytes(2**22)}, silent_seconds=0.05)


def test_each_pipe_has_its_own_bound_both_ways(ends):
    small, other = Pipe(ends[0], max_bytes=100), Pipe(ends[1])
    with pytest.raises(MessageError, match="where 100 are allowed"):
        small.send({"kind": "x", "data": bytes(100)})
    other.send({"kind": "x", "data": bytes(100)})
    with pytest.raises(PipeError, match="where 1 to 100 are allowed"):
        small.receive(1)


def test_a_reader_that_trickles_does_not_prolong_a_deadline(ends):
    ours, theirs = ends
    over = threading.Event()

    def trickle():
        while not over.wait(0.01):
            theirs.recv(2**16)

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(PipeSilentError, match="did not take a message in time"):
            Pipe(ours).send({"kind": "x", "data": bytes(15 * 2**20)}, seconds=0.1)
    finally:
        over.set()
        thread.join()


def test_a_sender_that_trickles_does_not_prolong_a_deadline(ends):
    ours, theirs = ends
    over = threading.Event()

    def trickle():
        theirs.sendall((1000).to_bytes(4, "little"))
        while not over.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(PipeSilentError, match="no complete message"):
            Pipe(ours).expect(0.2)
    finally:
        over.set()
        thread.join()


def test_a_small_message_is_left_out_where_it_would_have_to_wait(ends):
    pipe = Pipe(ends[0])
    sent = 0
    while pipe.try_send({"kind": "beat", "data": bytes(1000)}):
        sent += 1
    assert sent > 10
    other = Pipe(ends[1])
    assert [other.receive(0)["kind"] for _ in range(sent)] == ["beat"] * sent
    assert other.receive(0) is None


def test_two_sides_that_send_at_once_do_not_lock(ends):
    ours, theirs = Pipe(ends[0], drains=True), Pipe(ends[1])
    big = {"kind": "big", "data": bytes(2**22)}

    def other():
        for _ in range(3):
            theirs.send(big)
        got.extend(theirs.receive(20) for _ in range(3))

    got: list[object] = []
    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(3):
        ours.send(big, silent_seconds=20)
    assert [ours.receive(20) for _ in range(3)] == [big] * 3
    thread.join(20)
    assert got == [big] * 3


def test_a_request_arrives_as_it_was_made():
    limits = SamplingLimits(9, 0.7, frozenset({3, 7}), 32)
    made = SlotRequest(np.array([5, 2, 31]), b"k" * 32, 4, limits)
    arrived = unpack_request(decode(encode({"kind": "request", **pack_request(made)})[HEADER:]))
    assert arrived.prompt.tolist() == [5, 2, 31]
    assert (arrived.slot_key, arrived.group_size, arrived.limits) == (made.slot_key, 4, limits)


def test_a_completion_arrives_bit_for_bit():
    logprobs = np.array([-1e-300, -0.1, -np.inf])
    spans = (Span(0, b"a" * 32), Span(2, b"b" * 32))
    made = Finished(3, 1, Draw(np.array([1, 2, 3]), logprobs, "length", spans))
    message = {"kind": "finished", **pack_finished(made)}
    arrived = unpack_finished(decode(encode(message)[HEADER:]))
    assert (arrived.request, arrived.completion, arrived.draw.finish) == (3, 1, "length")
    assert arrived.draw.ids.tolist() == [1, 2, 3]
    assert arrived.draw.logprobs.tobytes() == logprobs.tobytes()
    assert arrived.draw.spans == spans
    for wrong in ({"finish": "bored"}, {"ids": b"1234567"}, {"ids": b""}, {"spans": [[0]]}, {"request": "3"}):
        with pytest.raises(PipeError):
            unpack_finished({**message, **wrong})


@pytest.mark.parametrize(("granule", "width"), [(1, np.uint16), (32, np.uint16), (48, np.uint32)])
def test_a_long_change_is_cut_between_whole_runs(granule, width):
    runs = 200_000 // granule
    positions = (np.arange(runs)[:, None] * 3 * granule + np.arange(granule)).ravel()
    change = Change("w", positions, np.arange(positions.size).astype(width))
    messages = [{"kind": "change", **fields} for fields in pack_change(change, granule)]
    assert len(messages) > 2
    parts = [unpack_change(decode(encode(message)[HEADER:])) for message in messages]
    assert all(part.positions.size % granule == 0 for part in parts)
    assert np.array_equal(np.concatenate([part.positions for part in parts]), positions)
    values = np.concatenate([part.values for part in parts])
    assert values.dtype == width
    assert np.array_equal(values, change.values)


@pytest.mark.parametrize("wrong", [{"width": 3}, {"values": b""}, {"positions": b"1234567"}, {"tensor": 1}])
def test_a_change_that_contradicts_itself_is_refused(wrong):
    (message,) = pack_change(Change("w", np.arange(3), np.arange(3, dtype=np.uint16)), 1)
    with pytest.raises(PipeError):
        unpack_change({"kind": "change", **message, **wrong})


@pytest.mark.parametrize("size", [0, 5, PIECE_BYTES, PIECE_BYTES + 1])
def test_a_tensor_goes_over_in_pieces(size):
    data = np.random.default_rng(0).bytes(size)
    tensor = TensorBytes("bf16", (size, 7), memoryview(data))
    cut = list(pieces(tensor))
    assert all(len(piece) <= PIECE_BYTES for piece in cut)
    assert b"".join(cut) == data
    assert unpack_shape(pack_shape("w", tensor)) == ("w", ("bf16", (size, 7), size))


@pytest.mark.parametrize("entry", [None, ["w", "bf16", [1]], ["w", "bf16", ["1"], 2], ["w", "bf16", [1], -2]])
def test_a_tensor_without_a_shape_is_refused(entry):
    with pytest.raises(PipeError):
        unpack_shape(entry)


@pytest.mark.parametrize("ids", [np.array([0.5]), np.array([[1, 2]]), np.array(["a"])])
def test_what_is_no_row_of_ids_is_not_sent(ids):
    with pytest.raises(EngineError, match="the prompt is no row of token ids"):
        pack_ids(ids, "the prompt")
