"""Yamux as its users see it: streams that carry exact bytes, wait, close and reset."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import pytest
import trio
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from echo_node.net.yamux.frames import INITIAL_WINDOW, RST, WINDOW, pack
from echo_node.net.yamux.muxer import LIMITS, Yamux
from tests.net.yamux_peers import BLOB, PEER, Pipe, read_all, two


async def test_what_is_written_is_read_whole_in_both_directions_at_once():
    async with two() as (one, other), trio.open_nursery() as nursery:
        ours = await one.open_stream()
        theirs = await other.accept_stream()

        async def send(stream, data):
            await stream.write(data)
            await stream.close()

        nursery.start_soon(send, ours, BLOB)
        nursery.start_soon(send, theirs, BLOB[::-1])
        assert await read_all(theirs) == BLOB
        assert await read_all(ours) == BLOB[::-1]


async def test_data_before_the_end_are_read_in_full_after_the_connection_is_gone():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        await ours.write(b"answer")
        await ours.close()
        await wait_all_tasks_blocked()
        await one.close()
        await other.event_closed.wait()
        assert await read_all(theirs) == b"answer"


async def test_data_before_a_reset_are_read_and_then_the_reset():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        await ours.write(b"no such protocol")
        await wait_all_tasks_blocked()
        await ours.reset()
        await wait_all_tasks_blocked()
        assert await theirs.read() == b"no such protocol"
        with pytest.raises(MuxedStreamReset):
            await theirs.read()
        with pytest.raises(MuxedStreamReset):
            await theirs.write(b"hello?")


async def test_what_we_reset_does_not_look_like_a_whole_message():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        await ours.write(b"half of it, unread")
        await ours.close()
        await wait_all_tasks_blocked()
        await theirs.reset()
        with pytest.raises(MuxedStreamReset):
            await theirs.read()


async def test_a_side_that_closed_still_reads_and_cannot_write():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        await ours.close_write()
        with pytest.raises(MuxedStreamClosed):
            await ours.write(b"more")
        with pytest.raises(MuxedStreamEOF):
            await theirs.read(10)
        await theirs.write(b"answer")
        await theirs.close()
        assert await read_all(ours) == b"answer"


@pytest.mark.parametrize("moment", range(12))
async def test_closing_while_another_writes_ends_the_stream_after_whole_frames(moment):
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()

        async def write():
            with suppress(MuxedStreamClosed):
                await ours.write(BLOB)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for _ in range(moment):
                await trio.lowlevel.checkpoint()
            await ours.close()
        assert BLOB.startswith(await read_all(theirs))
        await wait_all_tasks_blocked()
        assert (one.why, other.why) == ("", "")


async def test_nothing_follows_the_end_of_a_stream_whose_writer_does_not_know_it_yet():
    left, _ = memory_stream_pair()
    conn = Yamux(Pipe(left, is_initiator=True), PEER)
    stream = await conn.open_stream()

    async def write():
        with pytest.raises(MuxedStreamReset):
            await stream.write(BLOB)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        conn._core.next_batch()
        assert conn._core.has_something_to_send
        stream.abandon()
        assert conn._core.next_batch() == pack(WINDOW, RST, 1, 0)


async def test_a_read_gives_no_more_than_asked_and_nothing_is_lost_between_reads():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        await ours.write(BLOB[:100_000])
        await ours.close()
        assert await theirs.read(0) == b""
        assert await theirs.read(3) == BLOB[:3]
        assert await read_all(theirs, 777) == BLOB[3:100_000]


async def test_a_reader_that_pauses_for_minutes_keeps_its_stream(autojump_clock):  # noqa: ARG001
    async with two() as (one, other), trio.open_nursery() as nursery:
        ours = await one.open_stream()
        theirs = await other.accept_stream()

        async def send():
            await ours.write(BLOB)
            await ours.close()

        nursery.start_soon(send)
        await trio.sleep(300)
        assert await read_all(theirs) == BLOB


async def test_a_stopped_reader_holds_up_no_other_stream():
    async with two() as (one, other), trio.open_nursery() as nursery:
        stuck = await one.open_stream()
        await other.accept_stream()
        nursery.start_soon(stuck.write, BLOB)
        await wait_all_tasks_blocked()
        free = await one.open_stream()
        theirs = await other.accept_stream()
        await free.write(b"passes")
        assert await theirs.read() == b"passes"
        nursery.cancel_scope.cancel()


async def test_a_small_message_is_not_kept_waiting_by_a_large_one():
    order = []
    async with two(streams=lockstep_stream_pair()) as (one, other), trio.open_nursery() as nursery:
        streams = [await one.open_stream() for _ in range(3)]
        theirs = [await other.accept_stream() for _ in streams]

        async def send(name, stream, data):
            await stream.write(data)
            await stream.close()
            order.append(name)

        async def receive(stream):
            await read_all(stream)

        for stream in theirs:
            nursery.start_soon(receive, stream)
        nursery.start_soon(send, "large", streams[0], BLOB)
        while not len(streams[0]._outgoing):  # until it has begun
            await trio.lowlevel.checkpoint()
        nursery.start_soon(send, "middle", streams[1], BLOB[:400_000])
        nursery.start_soon(send, "small", streams[2], b"small")
    assert order == ["small", "middle", "large"]


async def test_streams_that_are_all_full_progress_at_the_same_rate():
    async with two() as (one, other), trio.open_nursery() as nursery:
        got = {}
        for index in range(4):
            stream = await one.open_stream()
            theirs = await other.accept_stream()
            got[index] = 0

            async def receive(index=index, theirs=theirs):
                while True:
                    got[index] += len(await theirs.read())
                    if got[index] >= 4_000_000:
                        nursery.cancel_scope.cancel()

            nursery.start_soon(stream.write, BLOB)
            nursery.start_soon(receive)
    assert min(got.values()) > 0.5 * max(got.values())


async def test_a_cancelled_write_leaves_whole_frames_and_a_stream_that_can_be_reset():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.write, BLOB)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert await theirs.read() == BLOB[:INITIAL_WINDOW]
        await ours.write(b"the end")
        await ours.close()
        assert await read_all(theirs) == b"the end"
        second = await one.open_stream()
        await second.write(b"still in step")
        assert await (await other.accept_stream()).read() == b"still in step"


@pytest.mark.parametrize("moment", range(12))
async def test_a_write_cancelled_at_any_moment_keeps_the_connection_in_step(moment):
    async with two(streams=lockstep_stream_pair()) as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        got = []

        async def receive():
            got.append(await read_all(theirs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(ours.write, BLOB)
                    for _ in range(moment):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            await ours.close()
        assert BLOB.startswith(got[0])
        second = await one.open_stream()
        await second.write(b"in step")
        assert await (await other.accept_stream()).read() == b"in step"


async def test_a_cancelled_read_loses_nothing():
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        for moment in range(8):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(theirs.read)
                    await wait_all_tasks_blocked()
                    nursery.start_soon(ours.write, bytes([moment]))
                    scope.cancel()
        await ours.close()
        left = await read_all(theirs)
        assert left == bytes(sorted(left)), "in order"
        await other.close()


async def test_a_read_that_waits_past_its_deadline_fails_and_the_stream_lives(autojump_clock):  # noqa: ARG001
    async with two() as (one, other):
        ours = await one.open_stream()
        theirs = await other.accept_stream()
        theirs.set_deadline(3)
        with pytest.raises(MuxedStreamError, match="deadline"):
            await theirs.read()
        theirs.set_deadline(60)
        await ours.write(b"late")
        assert await theirs.read() == b"late"
        with pytest.raises(ValueError):
            theirs.set_deadline(-1)


async def answer(stream):
    """Answer requests; a fifth of them is refused, and some are not read to the end."""
    try:
        index = int(await stream.read(8))
        if index % 5 == 0:
            await stream.reset()
            return
        await stream.write(b"answer")
        await stream.close()
        if index % 5 != 1:
            await read_all(stream)
    except MuxedStreamReset:
        await stream.reset()


async def ask(conn, questions):
    """Send requests in turn, each on its own stream; a third is cancelled before the answer."""
    for index in questions:
        async with await conn.open_stream() as stream:
            await stream.write(b"%d" % index)
            if index % 3 == 0:
                await stream.reset()
                continue
        try:
            assert await read_all(stream) == b"answer"
        except MuxedStreamReset:
            assert index % 5 == 0


async def test_ten_thousand_streams_leave_no_trace():
    async with two() as (one, other), trio.open_nursery() as nursery:

        async def accept():
            while True:
                nursery.start_soon(answer, await other.accept_stream())

        nursery.start_soon(accept)
        async with trio.open_nursery() as askers:
            for start in range(0, 10_000, 400):
                askers.start_soon(ask, one, range(start, start + 400))
        await wait_all_tasks_blocked()
        for conn in (one, other):
            core = conn._core
            assert not conn.why
            assert conn.open_streams == 0
            assert (core._inbound, core._unread, len(core._ready), len(core.unaccepted)) == (0, 0, 0, 0)
            assert core.slots.value == LIMITS.outbound
            assert core._growth == LIMITS.growth
        nursery.cancel_scope.cancel()


async def test_a_stream_that_is_read_fast_gets_a_larger_window_and_gives_it_back():
    async with two() as (one, other), trio.open_nursery() as nursery:
        ours = await one.open_stream()
        theirs = await other.accept_stream()

        async def send():
            await ours.write(BLOB * 4)
            await ours.close()

        nursery.start_soon(send)
        assert await read_all(theirs) == BLOB * 4
        assert theirs.window > 2_000_000
        await theirs.close()
        assert other._core._growth == LIMITS.growth


async def test_all_windows_together_grow_no_more_than_the_bound():
    limits = replace(LIMITS, growth=1_000_000)
    async with two(limits) as (one, other), trio.open_nursery() as nursery:
        theirs = []
        for _ in range(8):
            nursery.start_soon((await one.open_stream()).write, BLOB)
            theirs.append(await other.accept_stream())
        for stream in theirs:
            for _ in range(40):
                await stream.read(65_536)
        assert sum(stream.window for stream in theirs) == 8 * INITIAL_WINDOW + 1_000_000
        nursery.cancel_scope.cancel()


async def test_a_stream_that_is_read_slowly_keeps_its_window(autojump_clock):  # noqa: ARG001
    async with two() as (one, other), trio.open_nursery() as nursery:
        nursery.start_soon((await one.open_stream()).write, BLOB)
        theirs = await other.accept_stream()
        for _ in range(20):
            await trio.sleep(1)
            await theirs.read(65_536)
        assert theirs.window == INITIAL_WINDOW
        nursery.cancel_scope.cancel()


async def test_whoever_opens_too_many_streams_waits_for_one_to_end_and_not_for_ever(autojump_clock):  # noqa: ARG001
    limits = replace(LIMITS, outbound=2)
    async with two(limits) as (one, _):
        first = await one.open_stream()
        await one.open_stream()
        with pytest.raises(MuxedStreamError, match="open already"):
            await one.open_stream()
        await first.reset()
        await one.open_stream()

        async def wait():
            with pytest.raises(MuxedConnUnavailable):
                await one.open_stream()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.sleep(1)
            began = trio.current_time()
            await one.close()
        assert trio.current_time() - began < 1, "the end wakes those who wait"


async def test_a_stream_that_the_peer_never_closes_is_reset_in_the_end_unless_someone_reads(autojump_clock):  # noqa: ARG001
    async with two() as (one, other), trio.open_nursery() as nursery:
        forgotten = await one.open_stream()
        awaited = await one.open_stream()
        await forgotten.close()
        await awaited.close()
        await other.accept_stream()
        answering = await other.accept_stream()
        got = []

        async def read():
            got.append(await awaited.read())

        nursery.start_soon(read)
        await trio.sleep(600)
        assert one.open_streams == 1
        await answering.write(b"after ten minutes")
        await wait_all_tasks_blocked()
        assert got == [b"after ten minutes"]


async def test_a_quiet_connection_lives_and_says_little(autojump_clock):  # noqa: ARG001
    async with two() as (one, other):
        writes = []
        write = one.secured_conn.write

        async def count(data):
            writes.append(data)
            await write(data)

        one.secured_conn.write = count
        await trio.sleep(3600)
        assert not one.is_closed
        assert not other.is_closed
        assert len(writes) <= 2 * 3600 / LIMITS.ping_seconds


@pytest.mark.parametrize(
    # The deadlines of a write that hangs and of a silent peer can pass in the same second: either
    # is then the reason.
    ("make", "why"),
    [(memory_stream_pair, "not a byte"), (lockstep_stream_pair, "writing|not a byte")],
)
async def test_a_peer_that_has_gone_silent_is_noticed(make, why, autojump_clock):  # noqa: ARG001
    left, right = make()
    conn = Yamux(Pipe(left, is_initiator=True), PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conn.start)
        await conn.event_started.wait()
        stream = await conn.open_stream()
        began = trio.current_time()
        with pytest.raises(MuxedStreamReset):
            await stream.read()
        assert trio.current_time() - began <= LIMITS.dead_seconds + LIMITS.ping_seconds
        await conn.event_closed.wait()
        assert re.search(why, conn.why)
        assert not conn.violation
    await right.aclose()


async def test_closing_wakes_everyone_who_waits_and_tells_once():
    told = []

    async def on_close():
        told.append(True)

    async with two() as (one, other):
        one.on_close = on_close
        stream = await one.open_stream()
        await other.accept_stream()
        await one.open_stream()
        theirs = await other.accept_stream()

        async def read():
            with pytest.raises(MuxedStreamReset):
                await stream.read()

        async def write():
            with pytest.raises(MuxedStreamReset):
                await theirs.write(BLOB)

        async def accept():
            with pytest.raises(MuxedConnUnavailable):
                await one.accept_stream()

        async with trio.open_nursery() as nursery:
            for wait in (read, write, accept):
                nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await one.close()
            await one.close()
        await other.event_closed.wait()
        assert told == [True]
        assert one.is_closed
        assert one.secured_conn.closed
        assert not one.violation
        assert not other.violation
        with pytest.raises(MuxedConnUnavailable):
            await one.open_stream()
        await stream.close()
        await stream.reset()


async def test_a_connection_can_be_closed_before_it_started():
    left, _ = lockstep_stream_pair()
    conn = Yamux(Pipe(left, is_initiator=True), PEER)
    await conn.close()
    assert conn.is_closed
    assert not conn.is_established
    await conn.start()
    with pytest.raises(MuxedConnUnavailable):
        await conn.accept_stream()


async def test_a_cancelled_connection_closes_what_is_below():
    left, _ = lockstep_stream_pair()
    conn = Yamux(Pipe(left, is_initiator=True), PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conn.start)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert conn.is_closed
    assert conn.secured_conn.closed


async def test_a_hook_that_raises_does_not_reach_the_swarm():
    async def on_close():
        raise RuntimeError("a bug elsewhere")

    async with two() as (one, _):
        one.on_close = on_close
        await one.close()
        assert one.is_closed
