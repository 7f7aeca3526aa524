"""A trio loop in a thread, as long as a target is open, on a clock that jumps over every wait.

So a handler that waits for a silent peer is through in no time, and one that waits without a
deadline is found.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final

import trio
import trio.testing

from tests.fuzz.target import BugError, Feed

HANG_SECONDS: Final = 100_000.0
"""Of the clock that jumps: longer than any deadline, and no longer than it takes to say so."""
AFeed = Callable[[bytes], Awaitable[object]]
AOpener = Callable[[], AbstractAsyncContextManager[AFeed]]


@contextmanager
def looped(opener: AOpener, *, still: float = 0.0, patient: bool = False) -> Generator[Feed]:
    """Run a target's coroutines.

    `still` is how long all must rest before the clock jumps: more than 0 where threads work.

    A `patient` one may wait for as long as its peer is connected: something else ends that.
    """
    ready, over = threading.Event(), trio.Event()
    told: dict[str, Any] = {}

    async def main() -> None:
        async with opener() as feed:
            told.update(feed=feed, token=trio.lowlevel.current_trio_token())
            ready.set()
            await over.wait()

    def run() -> None:
        try:
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=still))
        except BaseException as error:  # noqa: BLE001 -- it is raised again where the target was opened
            told["error"] = error
        finally:
            ready.set()

    async def one(data: bytes) -> object:
        with trio.move_on_after(HANG_SECONDS) as scope:
            return await told["feed"](data)
        if scope.cancelled_caught and not patient:
            raise BugError("it waits for ever")
        return None

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if "error" in told:
        raise told["error"]
    try:
        yield lambda data: trio.from_thread.run(one, data, trio_token=told["token"])
    finally:
        trio.from_thread.run_sync(over.set, trio_token=told["token"])
        thread.join()
    if "error" in told:
        raise told["error"]


def bare(feed: AFeed) -> AOpener:
    """An opener of a coroutine that needs nothing around it."""

    @asynccontextmanager
    async def opened() -> Any:
        yield feed

    return opened
