"""Curves and times as a table, a picture and one line of numbers. Reads results; runs nothing.

Steps to a reward are read off a curve by straight lines between its points. A curve that never gets
there counts as if it took the whole run. Intervals are bootstrapped over the seeds: 95 % of medians
of resampled curves lie within.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from benchmarks.convergence_task import Curve, Trained

ENOUGH = 0.8
RESAMPLED = 4000
LAST_POINTS = 3
"""Over how many evaluations at the end of a run the final reward is the mean."""
BOUNDS: Final = {
    "sequential_steps_over_trl": ("at most", 1.10),
    "async_s4_steps_over_trl": ("at most", 1.35),
    "final_reward_gap": ("at most", 0.02),
    "step_time_over_trl": ("at most", 0.8),
    "trainer_busy_async": ("at least", 0.9),
    "async_wall_over_sequential": ("at most", 0.75),
}
COUNTED_SIDES: Final = ("sequential", "async S=4")
"""Sides whose final reward is compared with TRL's: both protocols at their defaults."""


def steps_to(curve: Curve, reward: float = ENOUGH) -> float:
    """After how many steps the held-out reward was there for the first time."""
    for (step, low), (later, high) in itertools.pairwise(curve):
        if high >= reward:
            return step + (later - step) * max(0.0, reward - low) / max(high - low, 1e-9)
    return float(curve[-1][0])


def final_reward(curve: Curve) -> float:
    return statistics.fmean(reward for _, reward in curve[-LAST_POINTS:])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(np.array(values), (RESAMPLED, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def median_over(sides: Mapping[str, list[Trained]], side: str, of: Callable[[Curve], float]) -> float | None:
    """Return the median over a side's seeds, or None if it has not run."""
    runs = sides.get(side, [])
    return statistics.median(of(run.curve) for run in runs) if runs else None


def figures(sides: Mapping[str, list[Trained]], times: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures; what was not measured is null."""

    def steps_over_trl(side: str) -> float | None:
        mine, theirs = median_over(sides, side, steps_to), median_over(sides, "TRL", steps_to)
        return None if mine is None or theirs is None else mine / theirs

    theirs = median_over(sides, "TRL", final_reward)
    mine = [median_over(sides, side, final_reward) for side in COUNTED_SIDES]
    known = [value for value in mine if value is not None]
    gap = theirs - min(known) if theirs is not None and len(known) == len(mine) else None
    medians = {
        "sequential_steps_over_trl": steps_over_trl("sequential"),
        "async_s4_steps_over_trl": steps_over_trl("async S=4"),
        "async_s8_steps_over_trl": steps_over_trl("async S=8"),
        "final_reward_gap": gap,
        **{
            name: times.get(name)
            for name in ("step_time_over_trl", "trainer_busy_async", "async_wall_over_sequential")
        },
    }
    return {name: None if value is None else round(value, 4) for name, value in medians.items()}


def steps_table(sides: Mapping[str, list[Trained]]) -> Table:
    table = Table(
        "side",
        "seeds",
        f"steps to {ENOUGH}",
        "over TRL",
        "final reward",
        "mean age of groups",
        title="Held-out reward by steps: medians over the seeds [95 % by the bootstrap]",
    )
    theirs = median_over(sides, "TRL", steps_to)
    for side, runs in sides.items():
        if not runs:
            continue
        needed = [steps_to(run.curve) for run in runs]
        final = [final_reward(run.curve) for run in runs]
        ages = sum(sum(run.ages.values()) for run in runs)
        age = sum(age * count for run in runs for age, count in run.ages.items()) / ages if ages else None
        table.add_row(
            side,
            str(len(runs)),
            ("at least " if statistics.median(needed) >= runs[0].steps else "")
            + _with_interval(needed, "{:.0f}"),
            "" if theirs is None else f"{statistics.median(needed) / theirs:.2f}",
            _with_interval(final, "{:.3f}"),
            "" if age is None else f"{age:.2f}, at most {max(max(run.ages) for run in runs)}",
        )
    return table


def times_table(times: Mapping[str, Any]) -> Table:
    table = Table("a step", "ms", "against", "ms", "ratio", "trainer busy", title="Times: medians of pairs")
    table.add_row(
        "ours, co-located",
        f"{times['our_step_ms']:.0f}",
        "TRL",
        f"{times['trl_step_ms']:.0f}",
        f"{times['step_time_over_trl']:.2f}",
        "",
    )
    table.add_row(
        f"asynchronous, {times['volunteers']} volunteers, {times['delay_ms']:.0f} ms a call",
        f"{times['async_step_ms']:.0f}",
        "sequential",
        f"{times['sequential_step_ms']:.0f}",
        f"{times['async_wall_over_sequential']:.2f}",
        f"{times['trainer_busy_async']:.2f} ({times['trainer_busy_async_from_start']:.2f} from the first step)"
        f" against {times['trainer_busy_sequential']:.2f},"
        f" groups {times['async_mean_staleness']:.1f} steps old",
    )
    return table


def bounds_lines(measured: Mapping[str, float | None]) -> list[str]:
    """Return one line per bounded figure: its bound, and whether it holds."""
    lines = []
    for name, (word, bound) in BOUNDS.items():
        value = measured.get(name)
        if value is None:
            lines.append(f"{name}: not measured, {word} {bound}")
            continue
        holds = value <= bound if word == "at most" else value >= bound
        lines.append(f"{name}: {value}, {word} {bound}: {'holds' if holds else 'MISSED'}")
    return lines


def draw_curves(sides: Mapping[str, list[Trained]], file: Path) -> None:
    """Median curves with the bootstrapped interval of the median as a band."""
    import matplotlib as mpl  # noqa: PLC0415 - only a picture needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=120)
    for side, runs in sides.items():
        if not runs:
            continue
        at = np.arange(0, min(run.curve[-1][0] for run in runs) + 1, 5)
        points = [np.array(run.curve) for run in runs]
        rows = np.array([np.interp(at, curve[:, 0], curve[:, 1]) for curve in points])
        bands = np.array([interval(column) for column in rows.T])
        (line,) = axes.plot(at, np.median(rows, axis=0), linewidth=1.6, label=f"{side} ({len(runs)} seeds)")
        axes.fill_between(at, bands[:, 0], bands[:, 1], alpha=0.12, color=line.get_color())
    axes.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="optimiser step", ylabel="held-out reward", ylim=(0.2, 1.0))
    axes.set_title("The embedded model learns: co-located, sequential, asynchronous")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def _with_interval(values: Sequence[float], form: str) -> str:
    low, high = interval(values)
    return f"{form.format(statistics.median(values))} [{form.format(low)}, {form.format(high)}]"
