"""SmolLM2-135M learns over the swarm and by TRL: held-out accuracy, steps, time, bytes.

    python -m benchmarks.smollm2                        what is missing, one run after the other
    python -m benchmarks.smollm2 --only async larger 0  one run
    python -m benchmarks.smollm2 --report               no run: figures and picture of what is kept

Required are two asynchronous seeds and one of TRL for each task, and one sequential run on
`larger`. Results are kept in benchmarks/smollm2.jsonl as they come: a benchmark that was broken off
goes on where it was. The picture is examples/pictures/smollm2.png. A run trains for 40 minutes at
most. It needs trl and matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.smollm2_report import draw_curves, figures
from benchmarks.smollm2_task import PICTURE, PROMPTS, QUICK_RESULTS, RESULTS, TASKS, Trained

Wanted = tuple[str, str, int]
"""Side, task and seed."""
REQUIRED: Final[Sequence[Wanted]] = (
    *((side, "larger", seed) for side, seed in (("async", 0), ("TRL", 0), ("async", 1), ("sequential", 0))),
    *((side, "nth-word", seed) for side, seed in (("async", 0), ("TRL", 0), ("async", 1))),
    *((side, "two-digit-sums", seed) for side, seed in (("async", 0), ("TRL", 0), ("async", 1))),
)
QUICK_STEPS, QUICK_PROMPTS = 2, 16


class Kept:
    """Results so far, in a file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.read_text("utf-8").rpartition("\n")[0] if file.exists() else ""
        rows = [json.loads(line) for line in whole.splitlines()]
        self.runs = [_read(row) for row in rows if "side" in row]
        self.arithmetic: dict[str, float] = next(
            (row["arithmetic"] for row in reversed(rows) if "arithmetic" in row), {}
        )

    def missing(self) -> list[Wanted]:
        there = {(run.side, run.task, run.seed) for run in self.runs}
        return [wanted for wanted in REQUIRED if wanted not in there]

    def add(self, row: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def train(side: str, task: str, seed: int, *, quick: bool) -> Trained:
    """One run of one side, in this process."""
    steps = QUICK_STEPS if quick else TASKS[task].steps
    prompts = QUICK_PROMPTS if quick else PROMPTS
    # Each side imports only what it needs: trl takes ten seconds.
    if side == "TRL":
        from benchmarks.smollm2_trl import train_trl  # noqa: PLC0415

        return train_trl(task, seed, steps, prompts)
    from benchmarks.smollm2_swarm import train_swarm  # noqa: PLC0415

    return train_swarm(side, task, seed, steps, prompts)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument(
        "--only", nargs=3, metavar=("SIDE", "TASK", "SEED"), help="one run, such as async larger 0"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="two steps and 16 prompts, kept apart")
    parser.add_argument("--arithmetic", action="store_true", help="only the bare passes of a batch")
    wish = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nodes and their folder end with it
    file = QUICK_RESULTS if wish.quick else RESULTS
    if wish.arithmetic:
        from benchmarks.smollm2_trl import arithmetic  # noqa: PLC0415

        Kept(file).add({"arithmetic": arithmetic("larger")})
    elif wish.only:
        side, task, seed = wish.only
        if (side, task, int(seed)) not in REQUIRED:
            parser.error(f"there is no run {side} {task} {seed}")
        trained = dataclasses.asdict(train(side, task, int(seed), quick=wish.quick))
        trained["more"]["load"] = round(os.getloadavg()[2], 1)  # two where nothing else ran
        Kept(file).add(trained)
    elif not wish.report:
        for wanted in Kept(file).missing():
            _run("--only", *map(str, wanted), quick=wish.quick)
        if not Kept(file).arithmetic:
            _run("--arithmetic", quick=wish.quick)
    kept = Kept(file)
    measured = figures(kept.runs, kept.arithmetic)
    if kept.runs:
        draw_curves(kept.runs, file.with_suffix(".png") if wish.quick else PICTURE)
    print(json.dumps(measured))


def _run(*words: str, quick: bool) -> None:
    """Make one run in a process of its own, so that its memory and threads end with it."""
    print(f"smollm2: {' '.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.smollm2", *words, *(["--quick"] if quick else [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def _read(row: dict[str, Any]) -> Trained:
    return Trained(**{**row, "curve": [(step, value) for step, value in row["curve"]]})


if __name__ == "__main__":
    main()
