"""Run blocking work in threads that stop soon after their task is cancelled."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TypeVar

import trio

T = TypeVar("T")


async def run_abandonable(work: Callable[[], T]) -> T:
    """Run `work` in a thread that is abandoned on cancellation.

    It must touch nothing shared.
    """
    found: T = await trio.to_thread.run_sync(work, abandon_on_cancel=True)  # type: ignore[call-arg] # libp2p's old stubs
    return found


async def run_stoppable(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run `work` in a thread and always wait for its end.

    `work` gets a function that says whether to stop. On cancellation the thread is asked to stop,
    and the cancellation continues once it has. Whatever the thread raises then is dropped.
    """
    stop = threading.Event()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stop.set()

    outcome: list[T] = []
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(work(stop.is_set))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the task
            failure.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_when_cancelled)
        await trio.to_thread.run_sync(attempt)
        nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint_if_cancelled()
    if failure:
        raise failure[0]
    return outcome[0]


@asynccontextmanager
async def enter_in_thread(manager: AbstractContextManager[T]) -> AsyncGenerator[T]:
    """Enter a slow context manager in a thread, and leave it in this one."""
    value = await run_abandonable(manager.__enter__)
    with ExitStack() as stack:
        stack.push(manager.__exit__)
        yield value
