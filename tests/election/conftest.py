"""Time that passes when nobody has anything to do. Threads would be outside of it, so what they do
is done in place.
"""

import pytest
import trio.testing


@pytest.fixture
def autojump_clock(monkeypatch):
    async def in_place(work, *args, **_options):
        await trio.lowlevel.checkpoint()
        return work(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", in_place)
    return trio.testing.MockClock(autojump_threshold=0)
