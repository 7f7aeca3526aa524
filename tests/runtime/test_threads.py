"""Work in threads: results, errors, and the end of the thread on cancellation."""

from __future__ import annotations

import threading

import pytest
import trio

from echo_node.runtime.threads import run_stoppable

SOON = 5.0


async def test_the_result_comes_back_and_the_work_was_done_in_another_thread():
    def work(stop):
        assert not stop()
        return threading.get_ident()

    assert await run_stoppable(work) != threading.get_ident()


@pytest.mark.parametrize("result", [None, False, [], ValueError("a value, not raised")])
async def test_any_result_is_a_result(result):
    assert await run_stoppable(lambda _: result) is result


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
async def test_an_error_leaves_as_it_was_raised_without_wrapping(kind):
    error = kind("of the work")

    def work(_stop):
        raise error

    with pytest.raises(kind) as caught:
        await run_stoppable(work)
    assert caught.value is error


async def test_cancellation_stops_the_thread_and_goes_on_only_once_it_has_ended():
    started, told, ended = threading.Event(), threading.Event(), []

    def work(stop):
        started.set()
        while not stop():
            told.wait(0.001)
        told.wait(0.05)
        ended.append(True)
        return "too late"

    with trio.fail_after(SOON), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel():
                await trio.to_thread.run_sync(started.wait)
                scope.cancel()

            nursery.start_soon(cancel)
            await run_stoppable(work)
            raise AssertionError("a cancelled task goes no further")
    assert scope.cancelled_caught
    assert ended == [True]


async def test_what_a_stopped_thread_raises_is_of_no_interest():
    started = threading.Event()

    def work(stop):
        started.set()
        while not stop():
            threading.Event().wait(0.001)
        raise RuntimeError("stopped by whoever asked for it")

    with trio.fail_after(SOON), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel():
                await trio.to_thread.run_sync(started.wait)
                scope.cancel()

            nursery.start_soon(cancel)
            await run_stoppable(work)
    assert scope.cancelled_caught


async def test_a_deadline_stops_it_too():
    def work(stop):
        while not stop():
            threading.Event().wait(0.001)

    with trio.fail_after(SOON), trio.move_on_after(0.05) as scope:
        await run_stoppable(work)
    assert scope.cancelled_caught


async def test_who_is_cancelled_already_starts_nothing():
    began = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_stoppable(lambda _: began.append(True))
    assert scope.cancelled_caught
    assert began == []


async def test_no_two_works_of_one_lock_ever_overlap_though_the_first_is_cancelled():
    """The engine's case: whoever comes next finds it free."""
    lock, engine, overlaps = trio.Lock(), threading.Lock(), []
    started = threading.Event()

    def work(stop):
        if not engine.acquire(blocking=False):
            overlaps.append(True)
            return
        started.set()
        while not stop():
            threading.Event().wait(0.001)
        engine.release()

    async def one(scope):
        with scope:
            async with lock:
                await run_stoppable(work)

    with trio.fail_after(SOON):
        for _ in range(5):
            started.clear()
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                nursery.start_soon(one, scope)
                await trio.to_thread.run_sync(started.wait)
                scope.cancel()
    assert overlaps == []


async def test_others_run_while_the_thread_works():
    ticks, enough = [], threading.Event()

    async def tick():
        while len(ticks) < 10:
            ticks.append(True)
            await trio.lowlevel.checkpoint()
        enough.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        assert await run_stoppable(lambda _: enough.wait(SOON))
