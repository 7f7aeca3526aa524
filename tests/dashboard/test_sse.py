"""The page of a trainer in a swarm that learns, in a real browser."""

from __future__ import annotations

import re
import threading

import pytest
import trio
from playwright.sync_api import expect

from echo_node.config import DemoConfig
from echo_node.demo.processes import SwarmDemo
from echo_node.telemetry.metrics import Records
from tests.dashboard.test_browser import browser, looking, tile

__all__ = ["browser"]


class Live:
    """A page somewhere, as `looking` wants it."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.mark.timeout(300)
def test_the_page_follows_a_demo_that_learns(browser, tmp_path):
    config = DemoConfig(steps=5000, samplers=1, engine="llama/f16", batch_groups=8)
    demo = SwarmDemo(config, Records(), tmp_path, page=0)
    demo.prepare()
    over: list[trio.CancelScope] = []
    learns = threading.Event()

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            over.append(nursery.cancel_scope)
            nursery.start_soon(demo.play)
            while not (demo.page and len(demo.records.steps) >= 2):  # noqa: ASYNC110 - a demo has no event for this
                await trio.sleep(0.1)
            token.append(trio.lowlevel.current_trio_token())
            learns.set()

    token: list[trio.lowlevel.TrioToken] = []
    swarm = threading.Thread(target=trio.run, args=(play,))
    swarm.start()
    try:
        assert learns.wait(120), demo.failure
        with looking(browser, Live(demo.page)) as tab:
            before = int(tile(tab, "Version").inner_text())
            expect(tab.locator("#phase")).to_have_text("working")
            expect(tile(tab, "Version")).not_to_have_text(str(before), timeout=60_000)
            assert int(tile(tab, "Version").inner_text()) > before
            expect(tile(tab, "Samplers")).to_have_text("1")
            expect(tab.locator("#reward path.curve")).to_have_attribute("d", re.compile("L|C"))
    finally:
        trio.from_thread.run_sync(over[0].cancel, trio_token=token[0])
        swarm.join(60)
    assert not swarm.is_alive()
