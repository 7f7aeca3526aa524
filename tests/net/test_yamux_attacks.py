"""What a peer may send, byte by byte, and what becomes of one that sends something else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamReset
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from echo_node.net.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    GONE_NORMALLY,
    INITIAL_WINDOW,
    INTERNAL_ERROR,
    PAYLOAD,
    PING,
    PROTOCOL_ERROR,
    RST,
    SYN,
    WINDOW,
    pack,
)
from echo_node.net.yamux.muxer import LIMITS, Yamux
from echo_node.net.yamux.receive_buffer import ReceiveBuffer
from tests.net.yamux_peers import PEER, Hand, Pipe, against_a_hand, read_all

SMALL = replace(LIMITS, inbound=4, late=1000, control=1200)


async def ends(ours, hand, code=PROTOCOL_ERROR):
    """Assert that the connection ends with this code, and that the right side is blamed."""
    with trio.fail_after(5):
        assert (await hand.frames())[-1] == (GO_AWAY, 0, 0, code, b"")
        await ours.event_closed.wait()
    assert bool(ours.violation) == (code == PROTOCOL_ERROR)
    with pytest.raises(MuxedConnUnavailable):
        await ours.accept_stream()


async def lives(ours, hand):
    """The connection still answers a ping."""
    await hand.send(PING, SYN, 0, 77)
    with trio.fail_after(5):
        while await hand.frame() != (PING, ACK, 0, 77, b""):
            pass
    assert not ours.why


async def until_refused(stream, frame, pause=0):
    """Send the same frame on and on, until the other side has hung up."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            await stream.send_all(frame)
            await trio.sleep(pause)


async def test_the_bytes_of_each_frame_are_those_of_the_specification():
    async with against_a_hand(is_initiator=True) as (ours, hand):
        stream = await ours.open_stream()
        await stream.write(b"hello")
        await stream.close()
        await wait_all_tasks_blocked()
        wire = bytes(await hand.stream.receive_some())
        assert wire == bytes.fromhex(
            "00 01 0001 00000001 00000000"  # window update, SYN
            "00 00 0000 00000001 00000005 68656c6c6f"  # data
            "00 01 0004 00000001 00000000"  # window update, FIN
        )
        second = await ours.open_stream()
        await second.reset()
        await hand.stream.send_all(bytes.fromhex("00 02 0001 00000000 0badcafe"))  # ping
        await wait_all_tasks_blocked()
        assert bytes(await hand.stream.receive_some()) == bytes.fromhex(
            "00 01 0001 00000003 00000000"
            "00 01 0008 00000003 00000000"  # window update, RST
            "00 02 0002 00000000 0badcafe"  # ping, ACK
        )
        await ours.close()
        assert bytes(await hand.stream.receive_some()) == bytes.fromhex("00 03 0000 00000000 00000000")


async def test_a_stream_of_the_peer_is_acknowledged_and_its_data_granted_again():
    async with against_a_hand() as (ours, hand):
        await hand.data(1, b"a" * INITIAL_WINDOW, SYN)
        assert await hand.frame() == (WINDOW, ACK, 1, 0, b"")
        stream = await ours.accept_stream()
        assert await stream.read(INITIAL_WINDOW // 2) == b"a" * (INITIAL_WINDOW // 2)
        kind, flags, stream_id, increment, _ = await hand.frame()
        assert (kind, flags, stream_id) == (WINDOW, 0, 1)
        assert increment >= INITIAL_WINDOW // 2
        await hand.data(1, b"b" * increment)
        await lives(ours, hand)


async def test_every_data_frame_fits_one_noise_message_and_the_window_is_kept():
    async with against_a_hand(is_initiator=True) as (ours, hand), trio.open_nursery() as nursery:
        stream = await ours.open_stream()
        nursery.start_soon(stream.write, bytes(1_000_000))
        await wait_all_tasks_blocked()
        wire = await hand.stream.receive_some()
        await hand.send(WINDOW, 0, 1, 100_000)
        await wait_all_tasks_blocked()
        wire += await hand.stream.receive_some()
        nursery.cancel_scope.cancel()
        sizes = []
        at = 12
        while at < len(wire):
            assert wire[at : at + 8] == bytes.fromhex("00 00 0000 00000001")
            sizes.append(int.from_bytes(wire[at + 8 : at + 12]))
            at += 12 + sizes[-1]
        assert max(sizes) <= PAYLOAD == 65_507
        assert sum(sizes) == INITIAL_WINDOW + 100_000


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x01" + pack(PING, SYN, 0, 1)[1:], id="version"),
        pytest.param(pack(4, 0, 0, 0), id="type"),
        pytest.param(pack(WINDOW, 0x10 | SYN, 1, 0), id="flag"),
        pytest.param(pack(WINDOW, SYN, 2, 0), id="a stream with a number of ours"),
        pytest.param(pack(WINDOW, SYN, 0, 0), id="stream zero"),
        pytest.param(pack(DATA, 0, 0, 1) + b"x", id="data for stream zero"),
        pytest.param(pack(WINDOW, SYN, 1, 0) * 2, id="the same stream twice"),
        pytest.param(pack(DATA, 0, 5, 1) + b"x", id="data for a stream that was never opened"),
        pytest.param(pack(WINDOW, 0, 6, 1), id="room for a stream that was never opened"),
        pytest.param(pack(WINDOW, SYN, 1, 2**32 - 1), id="a window beyond 32 bits"),
        pytest.param(pack(DATA, SYN, 1, INITIAL_WINDOW + 1), id="more data than the window"),
        pytest.param(pack(WINDOW, SYN | FIN, 1, 0) + pack(DATA, 0, 1, 1) + b"x", id="data after the end"),
    ],
)
async def test_what_yamux_does_not_allow_ends_the_connection(frame):
    async with against_a_hand() as (ours, hand):
        await hand.stream.send_all(frame)
        await ends(ours, hand)


async def test_a_window_that_is_exceeded_in_small_steps_ends_the_connection():
    async with against_a_hand() as (ours, hand):
        await hand.send(WINDOW, SYN, 1, 0)
        for _ in range(INITIAL_WINDOW // 4096):
            await hand.data(1, bytes(4096))
        await lives(ours, hand)
        await hand.data(1, b"x")
        await ends(ours, hand)


async def test_more_streams_than_allowed_are_reset_and_the_others_live():
    async with against_a_hand(SMALL) as (ours, hand):
        for stream_id in range(1, 13, 2):
            await hand.data(stream_id, b"x", SYN)
        answers = [await hand.frame() for _ in range(6)]
        assert [flags for _, flags, *_ in answers] == [ACK] * 4 + [RST] * 2
        await lives(ours, hand)
        assert ours.open_streams == 4
        await (await ours.accept_stream()).reset()
        await hand.data(13, b"x", SYN)
        await wait_all_tasks_blocked()
        assert ours.open_streams == 4


async def test_a_stream_that_is_reset_before_it_was_accepted_is_never_handed_out():
    async with against_a_hand(SMALL) as (ours, hand):
        for stream_id in range(1, 2001, 2):
            await hand.data(stream_id, b"x" * 100, SYN)
            await hand.send(WINDOW, RST, stream_id, 0)
            await hand.frame()
        await hand.data(2001, b"the only one", SYN | FIN)
        assert await read_all(await ours.accept_stream()) == b"the only one"
        assert len(ours._core.unaccepted) == 0
        await lives(ours, hand)


async def test_what_was_on_its_way_to_a_stream_that_we_reset_is_ignored_and_no_more():
    async with against_a_hand(SMALL) as (ours, hand):
        await hand.send(WINDOW, SYN, 1, 0)
        await (await ours.accept_stream()).reset()
        await hand.data(1, bytes(INITIAL_WINDOW))
        await lives(ours, hand)
        await hand.data(1, bytes(SMALL.late + 1))
        await ends(ours, hand)


async def test_a_reset_in_the_middle_of_a_frame_keeps_the_connection_in_step():
    async with against_a_hand() as (ours, hand):
        await hand.send(DATA, SYN | FIN, 1, 1000, bytes(500))
        stream = await ours.accept_stream()
        await stream.reset()
        await hand.stream.send_all(bytes(500))
        await wait_all_tasks_blocked()
        with pytest.raises(MuxedStreamReset):
            await stream.read()
        await lives(ours, hand)
        assert ours.open_streams == 0


async def test_late_frames_for_a_stream_that_is_over_do_no_harm():
    async with against_a_hand() as (ours, hand):
        await hand.data(1, b"x", SYN | FIN)
        await (await ours.accept_stream()).close()
        for flags in (0, ACK, FIN, RST, FIN | RST):
            await hand.send(WINDOW, flags, 1, 2**32 - 1)
        await lives(ours, hand)


async def test_pings_without_end_from_one_that_never_reads_end_the_connection():
    left, right = lockstep_stream_pair()
    ours = Yamux(Pipe(left, is_initiator=False), PEER, limits=replace(SMALL, goodbye_seconds=0.01))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        with trio.fail_after(5):
            await until_refused(right, pack(PING, SYN, 0, 1))
            await ours.event_closed.wait()
    assert "does not read" in ours.violation
    assert len(ours._core._control) <= SMALL.control + 24


async def test_a_peer_that_never_reads_our_data_is_given_up(autojump_clock):  # noqa: ARG001
    left, right = lockstep_stream_pair()
    ours = Yamux(Pipe(left, is_initiator=True), PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        nursery.start_soon(until_refused, right, pack(PING, ACK, 0, 1), 1)
        await ours.event_started.wait()
        stream = await ours.open_stream()
        with pytest.raises(MuxedStreamReset):
            await stream.write(bytes(10_000_000))
        assert "writing" in ours.why


async def test_more_unread_bytes_than_a_connection_may_hold_end_it_without_blame():
    async with against_a_hand(replace(LIMITS, unread=1_000_000)) as (ours, hand):
        for stream_id in range(1, 9, 2):
            await hand.data(stream_id, bytes(INITIAL_WINDOW), SYN)
        await ends(ours, hand, INTERNAL_ERROR)


async def test_single_bytes_cost_no_more_than_bytes():
    inbox = ReceiveBuffer()
    message = bytes(60_000)
    for _ in range(100_000):
        inbox.put(memoryview(message)[:1])
    assert len(inbox._pieces) < 5
    inbox.put(memoryview(message)[:20_000])
    assert all(isinstance(piece, bytearray) for piece in inbox._pieces), "a view would keep 60 kB for 20"
    assert inbox.take(-1) == bytes(120_000)


async def test_a_large_backlog_is_dropped_when_the_peer_resets():
    async with against_a_hand() as (ours, hand):
        await hand.send(WINDOW, SYN, 1, 0)
        stream = await ours.accept_stream()
        await hand.frame()
        await hand.data(1, bytes(INITIAL_WINDOW))
        left = INITIAL_WINDOW
        while left <= INITIAL_WINDOW:
            left -= len(await stream.read(INITIAL_WINDOW // 2))
            *_, more, _ = await hand.frame()
            await hand.data(1, bytes(more))
            left += more
        await hand.send(WINDOW, RST, 1, 0)
        await wait_all_tasks_blocked()
        with pytest.raises(MuxedStreamReset):
            await stream.read()
        assert ours._core._unread == 0


async def test_a_goodbye_ends_the_connection_without_blame():
    async with against_a_hand() as (ours, hand):
        await hand.data(1, b"last words", SYN | FIN)
        stream = await ours.accept_stream()
        await hand.send(GO_AWAY, 0, 0, 0)
        await ends(ours, hand, GONE_NORMALLY)
        assert await read_all(stream) == b"last words"


@pytest.mark.parametrize("tail", [b"", pack(PING, SYN, 0, 1)[:5], pack(DATA, SYN, 1, 100) + b"half"])
async def test_a_peer_that_hangs_up_anywhere_ends_the_connection_without_blame(tail):
    async with against_a_hand() as (ours, hand):
        if tail:
            await hand.stream.send_all(tail)
        await hand.stream.send_eof()
        await ends(ours, hand, GONE_NORMALLY)


FRAMES = st.builds(
    lambda kind, flags, stream_id, body, lie: (
        pack(kind, flags, stream_id, len(body) + lie) + (body if kind == DATA else b"")
    ),
    st.integers(0, 3),
    st.one_of(st.integers(0, 15), st.sampled_from([0, 0, SYN, SYN, ACK, FIN, RST])),
    st.integers(0, 9),
    st.binary(max_size=50),
    st.sampled_from([0] * 12 + [1, 100_000, 2**31]),
)
BYTES = st.lists(st.one_of(FRAMES, FRAMES, FRAMES, st.binary(max_size=30)), max_size=40).map(b"".join)


@settings(max_examples=300)
@given(data=BYTES, cuts=st.lists(st.integers(1, 60), min_size=1, max_size=20), initiator=st.booleans())
def test_no_bytes_raise_out_of_a_connection(data, cuts, initiator):
    trio.run(_swallow, data, cuts, initiator)


async def _swallow(data, cuts, initiator):
    left, right = memory_stream_pair()
    ours = Yamux(Pipe(left, is_initiator=initiator), PEER)
    hand = Hand(right)

    async def handle(stream):
        try:
            await stream.write(await read_all(stream))
            await stream.close()
        except MuxedStreamReset:
            await stream.reset()

    async def accept(nursery):
        with suppress(MuxedConnUnavailable):
            while True:
                nursery.start_soon(handle, await ours.accept_stream())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        nursery.start_soon(accept, nursery)
        await ours.event_started.wait()
        nursery.start_soon(handle, await ours.open_stream())
        at = turn = 0
        while at < len(data) and not ours.is_closed:
            size = cuts[turn % len(cuts)]
            try:
                await right.send_all(data[at : at + size])
            except trio.BrokenResourceError:
                break
            at, turn = at + size, turn + 1
        await wait_all_tasks_blocked()
        if not ours.is_closed:
            await right.send_eof()
        with trio.fail_after(5):
            await hand.frames()
            await ours.event_closed.wait()
    assert ours.why
    assert ours.open_streams == 0
