"""Figures and picture of the SmolLM2 benchmark. Reads results; runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence_report import steps_to
from benchmarks.smollm2_task import TASKS, Trained

_SHORT = 0.02
"""The accuracy that both sides are asked for is this much below the lower of the two last ones."""


def figures(runs: Sequence[Trained], arithmetic: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures; what was not measured is null."""
    ours = [run for run in runs if run.side == "async"]
    swarm = [run for run in runs if run.side != "TRL"]
    larger = _of(runs, "async", "larger")
    found: dict[str, Any] = {
        "accuracy_gain": _median(larger, _gain),
        "nth_word_gain": _median(_of(runs, "async", "nth-word"), _gain),
        "two_digit_gain": _median(_of(runs, "async", "two-digit-sums"), _gain),
        "trl_gain": _median(_of(runs, "TRL", "larger"), _gain),
        "sequential_gain": _median(_of(runs, "sequential", "larger"), _gain),
        "steps_over_trl": _ratio(runs, "larger", _steps),
        "wall_over_trl": _ratio(runs, "larger", _seconds),
        "minutes": _median(larger, lambda run: run.seconds / 60),
        "delta_ratio": _median(ours, lambda run: run.more["delta_ratio"]),
        "honest_refused": sum(run.more["refused"] for run in swarm) if swarm else None,
        "groups_checked": sum(run.more["checked"] for run in swarm) if swarm else None,
        "verifier_looked_share": _median(ours, lambda run: run.more["looked_share"]),
        "drawn_and_not_looked_at": sum(run.more["passed_over"] for run in swarm) if swarm else None,
        "cycle_over_arithmetic": _cycle(larger, arithmetic.get("whole")),
        "cycle_over_shared_arithmetic": _cycle(larger, arithmetic.get("shared")),
        "cpu_over_arithmetic": _busy(larger, arithmetic.get("whole_cpu")),
        "cpu_over_shared_arithmetic": _busy(larger, arithmetic.get("shared_cpu")),
        "runs": len(runs),
    }
    for task in TASKS:
        mine, theirs = _of(runs, "async", task), _of(runs, "TRL", task)
        found[task] = {
            "held_out_before": _median(mine, lambda run: run.curve[0][1]),
            "held_out_after": _median(mine, lambda run: run.curve[-1][1]),
            "trl_held_out_after": _median(theirs, lambda run: run.curve[-1][1]),
            "steps_over_trl": _ratio(runs, task, _steps),
            "wall_over_trl": _ratio(runs, task, _seconds),
            "minutes": _median(mine, lambda run: run.seconds / 60),
            "seeds": len(mine),
        }
    return found


def draw_curves(runs: Sequence[Trained], file: Path) -> None:
    """Draw held-out accuracy by step: a panel for each task, a line for each run."""
    import matplotlib as mpl  # noqa: PLC0415 - only a picture needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    tasks = [task for task in TASKS if any(run.task == task for run in runs)]
    figure, grid = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), dpi=120, squeeze=False)
    colours = {"async": "C0", "sequential": "C2", "TRL": "C1"}
    for axes, task in zip(grid[0], tasks, strict=True):
        for run in (each for each in runs if each.task == task):
            steps, values = zip(*run.curve, strict=True)
            axes.plot(steps, values, color=colours[run.side], label=f"{run.side}, seed {run.seed}")
        axes.set(title=task, xlabel="optimiser step", ylabel="held-out accuracy", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _of(runs: Sequence[Trained], side: str, task: str) -> list[Trained]:
    return [run for run in runs if (run.side, run.task) == (side, task)]


def _gain(run: Trained) -> float:
    return run.curve[-1][1] - run.curve[0][1]


def _median(runs: Sequence[Trained], of: Callable[[Trained], float]) -> float | None:
    return round(statistics.median(of(run) for run in runs), 4) if runs else None


def _steps(run: Trained, goal: float) -> float:
    return steps_to(run.curve, goal)


def _seconds(run: Trained, goal: float) -> float:
    return run.seconds * steps_to(run.curve, goal) / max(run.steps, 1)


def _ratio(runs: Sequence[Trained], task: str, of: Callable[[Trained, float], float]) -> float | None:
    """Return ours over TRL's, both up to an accuracy that each of the runs reached."""
    mine, theirs = _of(runs, "async", task), _of(runs, "TRL", task)
    if not mine or not theirs:
        return None
    goal = min(run.curve[-1][1] for run in (*mine, *theirs)) - _SHORT
    below = statistics.median(of(run, goal) for run in theirs)
    return round(statistics.median(of(run, goal) for run in mine) / below, 4) if below else None


def _cycle(runs: Sequence[Trained], seconds: float | None) -> float | None:
    return (
        round(statistics.median(run.step_seconds for run in runs) / seconds, 4) if runs and seconds else None
    )


def _busy(runs: Sequence[Trained], seconds: float | None) -> float | None:
    """Return CPU seconds of all processes a step, start and evaluations included, over the bare."""
    if not runs or not seconds:
        return None
    return round(statistics.median(run.more["cpu_seconds"] / run.steps for run in runs) / seconds, 4)
