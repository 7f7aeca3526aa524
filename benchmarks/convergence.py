"""Convergence of swarm training against one machine: seven sides, eight seeds.

TRL's GRPOTrainer and our own step, co-located; the swarm, sequential and asynchronous at staleness
1, 2, 4 and 8. `steps` counts steps, two runs at a time, and is right on a busy machine as well;
`times` takes times, and wants a quiet one. Without either, both. Results are kept as they come: a
run that was broken off goes on where it was, `--fresh` starts over. The swarm is the in-memory
network in one process, with real nodes. It needs trl (the extra of that name) and matplotlib.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # and not where this is imported: what is set here is set for good
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of every side and every process
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import dataclasses
import json
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.convergence_report import (
    bounds_lines,
    draw_curves,
    figures,
    steps_table,
    times_table,
)
from benchmarks.convergence_task import Trained

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"
SIDES: Final = ("TRL", "co-located", "sequential", "async S=1", "async S=2", "async S=4", "async S=8")
SEEDS = 8
STEPS = 180
PROCESSES = 2


def train(side: str, seed: int, steps: int) -> Trained:
    """One run of one side, in this process."""
    # Each side imports only what it needs: trl takes ten seconds.
    if side == "TRL":
        from benchmarks.convergence_trl import train_trl  # noqa: PLC0415

        return train_trl(seed, steps)
    if side == "co-located":
        from benchmarks.convergence_ours import train_co_located  # noqa: PLC0415

        return train_co_located(seed, steps)
    from benchmarks.convergence_swarm import train_async, train_sequential  # noqa: PLC0415

    if side == "sequential":
        return train_sequential(seed, steps)
    return train_async(seed, steps, int(side.partition("=")[2]))


class Results:
    """Results so far, in a file of JSON lines."""

    def __init__(self, file: Path, *, fresh: bool = False) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            file.unlink(missing_ok=True)
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        lines = [json.loads(line) for line in whole.splitlines()]
        file.write_text(f"{whole}\n" if whole else "")  # half a line is what a run left that was broken off
        self.runs = [_read(line) for line in lines if "curve" in line]
        self.times: dict[str, Any] = next((each["times"] for each in reversed(lines) if "times" in each), {})

    def add(self, run: Trained) -> None:
        self.runs.append(run)
        self._write(dataclasses.asdict(run))

    def add_times(self, times: dict[str, Any]) -> None:
        self.times = times
        self._write({"times": times})

    def missing(self, sides: Sequence[str], seeds: int, steps: int) -> list[tuple[str, int]]:
        """Yield the runs still to be made, one seed of every side before the next."""
        there = {(run.side, run.seed) for run in self.runs if run.steps >= steps}
        return [(side, seed) for seed in range(seeds) for side in sides if (side, seed) not in there]

    def sides(self, seeds: int, steps: int) -> dict[str, list[Trained]]:
        found: dict[str, dict[int, Trained]] = {side: {} for side in SIDES}
        for run in self.runs:
            if run.steps >= steps and run.seed < seeds:
                curve = [(step, reward) for step, reward in run.curve if step <= steps]
                found[run.side][run.seed] = dataclasses.replace(run, steps=steps, curve=curve)
        return {side: [runs[seed] for seed in sorted(runs)] for side, runs in found.items()}

    def _write(self, row: dict[str, Any]) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def _read(line: dict[str, Any]) -> Trained:
    curve = [(step, reward) for step, reward in line["curve"]]
    ages = {int(age): count for age, count in line["ages"].items()}
    return Trained(line["side"], line["seed"], line["steps"], curve, ages, line["seconds"])


def count_steps(
    results: Results,
    missing: Sequence[tuple[str, int]],
    steps: int,
    processes: int,
    report: Callable[[str], None],
) -> None:
    """Make the runs that are missing, a few at a time; one at a time needs no other process."""

    def keep(run: Trained) -> None:
        results.add(run)
        report(f"{run.side}, seed {run.seed}: {run.curve[-1][1]:.3f} in {run.seconds:.0f} s")

    if processes == 1:
        for side, seed in missing:
            keep(train(side, seed, steps))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_be_quiet) as pool:
        waiting = [pool.submit(train, side, seed, steps) for side, seed in missing]
        try:
            for done in as_completed(waiting):
                keep(done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _be_quiet() -> None:
    logging.disable(logging.WARNING)  # a bar is drawn on the same terminal


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("steps", "times"), help="only this; both otherwise")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument(
        "--quick", action="store_true", help="two seeds and a few steps, to see that it works"
    )
    parser.add_argument("--seeds", type=int, default=None, help=f"default: {SEEDS}")
    parser.add_argument("--steps", type=int, default=None, help=f"default: {STEPS}")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES, help="only these")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and the picture go")
    wish = parser.parse_args(words)
    seeds = wish.seeds or (2 if wish.quick else SEEDS)
    steps = wish.steps or (6 if wish.quick else STEPS)
    name = "convergence-quick" if wish.quick else "convergence"
    fresh = wish.quick or (wish.fresh and wish.part != "times")  # times are always taken anew
    results = Results(wish.folder / f"{name}.jsonl", fresh=fresh)
    quiet, console = Console(stderr=True), Console()

    if wish.part != "times":
        missing = results.missing(wish.sides, seeds, steps)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=quiet) as bar:
            task = bar.add_task("runs", total=len(missing))

            def report(text: str) -> None:
                bar.console.print(text)
                bar.advance(task)

            count_steps(results, missing, steps, wish.processes, report)
    if wish.part != "steps":
        from benchmarks.convergence_times import measure  # noqa: PLC0415 - it imports torch and trl

        with quiet.status("times") as status:
            say = status.update if quiet.is_terminal else quiet.print
            few = {"turns": 2, "swarm_turns": 1, "swarm_steps": 3} if wish.quick else {}
            results.add_times(measure(say, **few))

    sides = results.sides(seeds, steps)
    console.print(steps_table(sides))
    if results.times:
        console.print(times_table(results.times))
    measured = figures(sides, results.times)
    for line in bounds_lines(measured):
        console.print(line, highlight=False)
    if any(sides.values()):
        picture = wish.folder / f"{name}.png"
        draw_curves(sides, picture)
        console.print(f"curves: {picture}", highlight=False, soft_wrap=True)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
