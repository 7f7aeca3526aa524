"""`echo-node demo`: play, show, draw, sum up. Ctrl-C stops it cleanly; what was learnt until then is summed up all the same."""

from __future__ import annotations

import json
from pathlib import Path

import trio
from rich.console import Console

from echo_node.config import DemoConfig, no_color, write_resolved
from echo_node.demo.picture import draw_rewards
from echo_node.demo.swarm import Demo
from echo_node.demo.view import line, summary, watch
from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.metrics import Records

INTERRUPTED = 130


def run_demo(config: DemoConfig, folder: Path, *, as_json: bool) -> int:
    """Run the whole demo; returns the exit code."""
    with boundary(
        ConfigError, f"making the folder {folder}", advice="--out takes a folder that can be written to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        write_resolved(config, folder / "config.toml")
        (folder / "steps.jsonl").unlink(missing_ok=True)
    demo = Demo(config, Records(folder / "steps.jsonl"))
    console = Console(stderr=as_json, no_color=no_color())
    interrupted = False
    try:
        trio.run(_play_and_watch, demo, console)
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        interrupted = True
    seconds = demo.seconds
    picture = None if interrupted else _draw(demo, folder / "reward.png")  # drawing takes a second
    console.print(line(demo), highlight=False, soft_wrap=True)
    console.print(
        ("Stopped.\n" if interrupted else "") + summary(demo, picture), highlight=False, soft_wrap=True
    )
    if as_json:
        print(json.dumps(outcome(demo, seconds)), flush=True)  # noqa: T201 - the answer that a script reads
    return INTERRUPTED if interrupted else 0


def outcome(demo: Demo, seconds: float) -> dict[str, float | int | str]:
    """The demo in five numbers."""
    return {
        "final_reward": round(demo.records.reward(), 4),
        "steps": len(demo.records.steps),
        "seconds": round(seconds, 2),
        "mode": demo.config.mode,
        "max_staleness_trained": demo.records.max_staleness,
    }


async def _play_and_watch(demo: Demo, console: Console) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, demo, console)
        await demo.play()
        nursery.cancel_scope.cancel()


def _draw(demo: Demo, file: Path) -> str | None:
    if not demo.records.steps:
        return None
    with boundary(StoreError, f"drawing {file}"):
        draw_rewards(demo.records.steps, f"echo-node demo, {demo.config.mode}, seed {demo.config.seed}", file)
    return str(file)
