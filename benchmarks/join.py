"""Time from a new sampler's start to its first accepted group.

A swarm of processes runs on the loopback: a seed, a trainer, a verifier and a sampler, as in the
demo. Then a sampler that has nothing, no key and no weights, is started by `echo-node join`, again
and again, with each engine. The clock starts with its process. `seconds_after_weights` counts from
the moment at which all weights are on its disk, proven. What each says is in its own events;
nothing else is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.table import Table

from echo_node.config import DemoConfig
from echo_node.demo.processes import END_SECONDS, LOOPBACK, SwarmDemo
from echo_node.demo.subprocesses import Child, end_all, node_command
from echo_node.engine.engine_classes import kinds
from echo_node.telemetry.metrics import Records

ENGINES: Final = ("llama/f16", "torch/f32")
STARTS: Final = 3
WARM_STEPS: Final = 5
"""Steps of the swarm before anybody joins it."""
LONGEST_SECONDS: Final = 180.0


class Newcomer:
    """One sampler from nothing, and when it was how far."""

    def __init__(self, name: str, engine: str, swarm: SwarmDemo) -> None:
        seed = next(member for member in swarm.members if member.role == "bootstrap")
        words = [
            *("join", "--role", "sampler", "--json", "--engine", engine, "--threads", "1"),
            *("--listen", LOOPBACK, "--state", str(swarm.folder / name)),
            *("--seed", seed.addresses[0], str(swarm.folder / "run")),
        ]
        self._reached: dict[str, float] = {}
        self._last: Mapping[str, Any] = {}
        self._news = trio.Event()
        self._began = time.time()
        self.child = Child(name, node_command(words), swarm.folder / f"{name}.log", self._hear)

    def _hear(self, event: Mapping[str, Any]) -> None:
        self._last = event
        seconds = event["at"] - self._began
        self._reached.setdefault(event["event"], seconds)
        first = event.get("first", {})
        if "accepted" in first:
            self._reached |= {
                "weights": first["weights"] - self._began,
                "group": first["accepted"] - self._began,
            }
        self._news.set()
        self._news = trio.Event()

    async def first_group(self) -> dict[str, float]:
        """Return the seconds to each stage, up to the first accepted group."""
        with trio.move_on_after(LONGEST_SECONDS):
            while "group" not in self._reached and not self.child.silent.is_set():
                await self._news.wait()
        if "group" not in self._reached:
            raise SystemExit(
                f"{self.child.name}: no group was accepted; it reached {self._reached}, and its last line was {self._last};"
                f" its log ends with {self.child.last_words()}"
            )
        return dict(self._reached)


async def measure(swarm: SwarmDemo, engine: str, number: int) -> dict[str, float]:
    """One start."""
    newcomer = Newcomer(f"newcomer-{engine.replace('/', '-')}-{number}", engine, swarm)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(newcomer.child.listen)
        try:
            return await newcomer.first_group()
        finally:
            await end_all([newcomer.child], END_SECONDS)
            nursery.cancel_scope.cancel()


async def run_all(
    folder: Path, engines: Sequence[str], starts: int, quiet: Console
) -> dict[str, list[dict[str, float]]]:
    """Every engine in turn, in one swarm."""
    swarm = SwarmDemo(DemoConfig(samplers=1, steps=100_000), Records(), folder)
    swarm.prepare()
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(swarm.play)
        with trio.fail_after(LONGEST_SECONDS):
            while len(swarm.records.steps) < WARM_STEPS:
                if swarm.failure:
                    raise SystemExit(f"{swarm.failure} {swarm.last_words}")
                await trio.sleep(0.1)
        for number in range(1, starts + 1):
            for engine in engines:
                found[engine].append(await measure(swarm, engine, number))
                quiet.print(f"{engine}, start {number}: {found[engine][-1]['group']:.1f} s", highlight=False)
        nursery.cancel_scope.cancel()
    return found


def figures(stations: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians over all starts."""

    def median(seconds: Sequence[float]) -> float:
        return round(statistics.median(seconds), 2)

    return {
        "seconds_to_first_group": median([each["group"] for each in stations]),
        "seconds_after_weights": median([each["group"] - each["weights"] for each in stations]),
        "seconds_to_network": median([each["listening"] for each in stations]),
        "seconds_to_roster": median([each["joined"] for each in stations]),
        "seconds_to_weights": median([each["weights"] for each in stations]),
    }


def table(measured: Mapping[str, Mapping[str, float]], starts: int) -> Table:
    made = Table(title=f"Seconds from a sampler's start, median of {starts}")
    for column in ("engine", "network", "roster", "weights", "first accepted group", "after weights"):
        made.add_column(column, justify="left" if column == "engine" else "right")
    names = ("to_network", "to_roster", "to_weights", "to_first_group", "after_weights")
    for engine, each in measured.items():
        made.add_row(engine, *(f"{each[f'seconds_{name}']:.1f}" for name in names))
    return made


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each engine")
    parser.add_argument("--starts", type=int, default=None, help=f"default: {STARTS}")
    wish = parser.parse_args(words)
    starts = wish.starts or (1 if wish.quick else STARTS)
    installed = {kind.engine_class for kind in kinds() if kind.installed}
    engines = [engine for engine in ENGINES if engine in installed]
    with tempfile.TemporaryDirectory(prefix="echo-join-") as folder:
        found = trio.run(run_all, Path(folder), engines, starts, Console(stderr=True))
    measured = {engine: figures(stations) for engine, stations in found.items()}
    Console().print(table(measured, starts))
    best = engines[0]
    chosen = {name: measured[best][name] for name in ("seconds_to_first_group", "seconds_after_weights")}
    print(json.dumps({**chosen, "engine": best, "starts": starts, "engines": measured}))


if __name__ == "__main__":
    main()
