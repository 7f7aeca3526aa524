"""Run `echo-node demo`: play, show progress, plot and sum up.

Ctrl-C stops in order and still prints the summary.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio
from rich.console import Console

from echo_node.config import DemoConfig, no_color, write_resolved
from echo_node.dashboard import free_port
from echo_node.demo.node_status import DemoState
from echo_node.demo.plot import draw_rewards
from echo_node.demo.processes import SwarmDemo, check_together
from echo_node.demo.summary import outcome, summary
from echo_node.demo.view import line, watch
from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.runtime.console import printable
from echo_node.runtime.signals import INTERRUPTED, ctrl_c_waits
from echo_node.telemetry.metrics import Records

TRIES = 10
"""Attempts to remove the swarm's folder."""
FAILED = 1


def run_demo(config: DemoConfig, folder: Path, *, as_json: bool, keep: bool = False) -> int:
    """Run the demo and return the exit code."""
    check_together(config)
    with boundary(
        ConfigError, f"making the folder {folder}", advice="--out takes a folder that can be written to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        write_resolved(config, folder / "config.toml")
        (folder / "steps.jsonl").unlink(missing_ok=True)
    records = Records(folder / "steps.jsonl")
    console = Console(stderr=as_json, no_color=no_color())
    if config.in_memory:
        return _in_one_process(config, records, folder, console, as_json=as_json)
    try:
        return _in_many(config, records, folder, console, as_json=as_json, keep=keep)
    except KeyboardInterrupt:  # before the first process was started, or after the last one had ended
        console.print("Stopped.")
        return INTERRUPTED


def _in_one_process(
    config: DemoConfig, records: Records, folder: Path, console: Console, *, as_json: bool
) -> int:
    from echo_node.demo.swarm import Demo

    demo = Demo(config, records)
    interrupted = False
    try:
        trio.run(_play_and_watch, demo, demo.play, console)
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        interrupted = True
    _sum_up(demo, folder, console, as_json=as_json, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0


def _in_many(
    config: DemoConfig, records: Records, folder: Path, console: Console, *, as_json: bool, keep: bool
) -> int:
    with _place(keep=keep) as place:
        demo = SwarmDemo(config, records, place, page=free_port() if console.is_terminal else None)
        demo.prepare()
        interrupted = trio.run(_until_signal, demo, console)
        if demo.failure:
            failure = "\n  ".join([demo.failure, *demo.last_words])
            console.print(printable(failure), highlight=False, markup=False, soft_wrap=True)
        _sum_up(demo, folder, console, as_json=as_json, interrupted=interrupted)
        if keep:
            kept = f"Kept: every node's state and log, and the run, are in {place}."
            console.print(printable(kept), highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED if interrupted else FAILED if demo.failure else 0


@contextmanager
def _place(*, keep: bool) -> Iterator[Path]:
    """Create a folder for the swarm and remove it afterwards, unless it is to be kept."""
    with boundary(
        StoreError, "making a folder for the swarm", advice="is the disk for temporary files full?"
    ):
        place = Path(tempfile.mkdtemp(prefix="echo-demo-"))
    try:
        yield place
    finally:
        if not keep:
            with ctrl_c_waits():
                _remove(place)


def _remove(place: Path) -> None:
    for _ in range(TRIES):
        shutil.rmtree(place, ignore_errors=True)
        if not place.exists():
            break
        time.sleep(0.2)  # a process that was just killed may still have been writing


async def _until_signal(demo: SwarmDemo, console: Console) -> bool:
    """Play until the end or the first SIGINT or SIGTERM; the second kills all."""
    interrupted = False
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            playing = trio.CancelScope()

            async def listen() -> None:
                nonlocal interrupted
                async for _ in signals:
                    if interrupted:
                        demo.kill()
                    interrupted = True
                    playing.cancel()

            nursery.start_soon(listen)
            with playing:
                await _play_and_watch(demo, demo.play, console)
            nursery.cancel_scope.cancel()
    return interrupted


async def _play_and_watch(demo: DemoState, play: Callable[[], Awaitable[None]], console: Console) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, demo, console)
        await play()
        nursery.cancel_scope.cancel()


def _sum_up(demo: DemoState, folder: Path, console: Console, *, as_json: bool, interrupted: bool) -> None:
    result = outcome(demo)
    picture = None if interrupted else _draw(demo, folder / "reward.png")  # drawing takes a second
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    say(line(demo))
    say(("Stopped.\n" if interrupted else "") + printable(summary(demo, picture)))
    if as_json:
        print(json.dumps(result), flush=True)  # noqa: T201 - the answer that a script reads


def _draw(demo: DemoState, file: Path) -> str | None:
    if not demo.records.steps:
        return None
    title = f"echo-node demo, {demo.config.mode}, seed {demo.config.seed}"
    with boundary(StoreError, f"drawing {file}"):
        draw_rewards(demo.records.steps, title, file, model_bytes=demo.model_bytes)
    return str(file)
