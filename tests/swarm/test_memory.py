"""A long-running sampler's memory does not grow. ECHO_NODE_MEMORY_MINUTES shortens the run."""

from __future__ import annotations

import os
import time

import numpy as np
import psutil
import pytest
import trio

from tests.swarm.processes import swarm_in

MINUTES = float(os.environ.get("ECHO_NODE_MEMORY_MINUTES", "20"))
WARM_UP = 0.2
"""The part of the run that is not counted: caches fill, allocators find their size."""
LOOK_SECONDS = 2.0
MOST_MB_A_MINUTE = 1.0
ONE_THREAD = ("--threads", "1")
CALM = {"learning_rate": 1e-6}
"""The policy stays what it is, so that each minute is like the others."""


def resident_mb(node: psutil.Process) -> float:
    """Of a node and of all that it has started: its engine, its contract's jail."""
    total = 0
    for process in (node, *node.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


def slope(minutes: list[float], megabytes: list[float]) -> float:
    """MB a minute, by least squares."""
    return float(np.polyfit(minutes, megabytes, 1)[0])


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.parametrize("engine", ["torch/f32", "llama/f16"])
async def test_the_memory_of_a_sampler_stays_flat(engine, tmp_path):
    async with swarm_in(tmp_path, algorithm=CALM) as swarm:
        trainer = await swarm.start("trainer", "--role", "trainer", *ONE_THREAD)
        sampler = await swarm.start("sampler", "--role", "sampler", "--engine", engine, *ONE_THREAD)
        await trainer.until(lambda node: len(node.all("step")) >= 3, within=200)
        node = psutil.Process(sampler.process.pid)
        began = time.monotonic()
        minutes: list[float] = []
        megabytes: list[float] = []
        while (now := (time.monotonic() - began) / 60) < MINUTES:
            minutes.append(now)
            megabytes.append(resident_mb(node))
            await trio.sleep(LOOK_SECONDS)
        warm = next(place for place, at in enumerate(minutes) if at >= WARM_UP * MINUTES)
        found = slope(minutes[warm:], megabytes[warm:])
        steps = len(trainer.all("step"))
        grew = f"{megabytes[warm]:.1f} MB after warm-up, {megabytes[-1]:.1f} MB at the end, {found:+.3f} MB a minute"
        print(f"{engine}: {grew}, {steps} steps")  # noqa: T201 - shown with -s
        assert sampler.last("progress")["accepted"] > 0
        assert steps > 3
        assert len(node.children(recursive=True)) >= 1, "the engine is among what was counted"
        assert found < MOST_MB_A_MINUTE


def test_a_slope_is_what_grows_in_a_minute():
    minutes = [0.0, 0.5, 1.0, 1.5, 2.0]
    assert slope(minutes, [100.0, 101.0, 102.0, 103.0, 104.0]) == pytest.approx(2.0)
    assert slope(minutes, [100.0, 104.0, 100.0, 96.0, 100.0]) < 0
