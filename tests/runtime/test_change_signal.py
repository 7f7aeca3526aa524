"""The change signal wakes all who wait, and no change between a look and a wait is missed."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.runtime.change_signal import ChangeSignal


async def test_every_waiter_is_woken_once():
    signal, woken = ChangeSignal(), []

    async def wait(name):
        await signal.wait()
        woken.append(name)
        await signal.wait()
        woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a")
        nursery.start_soon(wait, "b")
        await trio.testing.wait_all_tasks_blocked()
        signal.notify()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"], "and a second change is waited for"
        nursery.cancel_scope.cancel()


async def test_a_change_after_the_look_is_not_missed(autojump_clock):  # noqa: ARG001 - it jumps
    signal = ChangeSignal()
    seen = signal.count
    signal.notify()
    with trio.fail_after(1):
        await signal.wait(since=seen)
    with pytest.raises(trio.TooSlowError), trio.fail_after(1):
        await signal.wait(since=signal.count)
