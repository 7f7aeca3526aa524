"""Training with half the samplers cheating: clean, verified and unverified runs.

Four samplers, of whom two cheat; one verifier, whose word counts by the policy `sampled`. Besides
forgery in the open there is a side for each attack of `poisoned_attacks`. Steps are
counted until the held-out reward is 0.8, so a busy machine changes little. Everything is real but
the network, which is the in-memory one: nodes, seals, admission, verdicts. Needs matplotlib for the
picture. Results go into build/benchmarks.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # and not where this is imported: what is set here is set for good
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of every node
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import dataclasses
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.convergence_report import ENOUGH, final_reward, steps_to
from benchmarks.poisoned_attacks import ATTACKS
from benchmarks.poisoned_swarm import CHEATS, Outcome, Policy, play

FOLDER: Final = Path(__file__).parents[1] / "build" / "benchmarks"
STEPS: Final = 160
MOST_STEPS: Final = 1.3
"""Times those of the clean run."""
MOST_ATTACKED_STEPS: Final = 1.15
"""Times those of the clean run, under each named attack."""
MOST_FORGED: Final = 0.02
"""Share of forged groups among all that were trained on until the reward is reached."""
CLEAN, VERIFIED, BELIEVED = "clean", "verified", "unverified"
COLOURS: Final = {CLEAN: "tab:blue", VERIFIED: "tab:green", BELIEVED: "tab:red"}

Sides = Mapping[str, Sequence[Outcome]]


class Kept:
    """Outcomes on disk, a file for each side and seed, so that a run can be resumed."""

    def __init__(self, folder: Path, steps: int, policy: str, verifiers: int, *, resume: bool) -> None:
        self._folder = folder / f"{policy}-{verifiers}-{steps}"
        self._folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            for each in self._folder.glob("*.json"):
                each.unlink()

    def _file(self, side: str, seed: int) -> Path:
        return self._folder / f"{side}-{seed}.json"

    def read(self, side: str, seed: int) -> Outcome | None:
        """Return a kept outcome."""
        file = self._file(side, seed)
        return Outcome.of(json.loads(file.read_text("utf-8"))) if file.exists() else None

    def write(self, outcome: Outcome) -> None:
        """Keep an outcome; a file is whole or not there."""
        file = self._file(outcome.side, outcome.seed)
        scratch = file.with_suffix(".part")
        scratch.write_text(json.dumps(dataclasses.asdict(outcome)), "utf-8")
        scratch.replace(file)


def run_all(
    seeds: Sequence[int],
    steps: int,
    policy: Policy,
    verifiers: int,
    report: Callable[[str], None],
    attacks: Sequence[str] = (),
    kept: Kept | None = None,
) -> dict[str, list[Outcome]]:
    """Every side with every seed, one after the other; what is kept is not run again.

    An attack ends when the reward is reached: its figures say nothing of later steps.
    """
    sides: dict[str, list[Outcome]] = {name: [] for name in (CLEAN, *attacks, VERIFIED, BELIEVED)}
    checked: dict[str, Any] = {"cheats": CHEATS, "policy": policy, "verifiers": verifiers}
    options: dict[str, dict[str, Any]] = {
        CLEAN: {"cheats": 0},
        VERIFIED: checked,
        BELIEVED: {"cheats": CHEATS},
    }
    options |= {name: {**checked, "attack": ATTACKS[name], "enough": ENOUGH} for name in attacks}
    for seed in seeds:
        for side, outcomes in sides.items():
            done = kept.read(side, seed) if kept else None
            if done is None:
                done = play(side, seed, steps, **options[side])
                if kept:
                    kept.write(done)
            outcomes.append(done)
            report(f"{side}, seed {seed}: {done.curve[-1][1]:.3f} in {done.seconds:.0f} s")
    return sides


def reached(outcome: Outcome) -> bool:
    return any(reward >= ENOUGH for _, reward in outcome.curve)


def figures(sides: Sides) -> dict[str, Any]:
    """Return medians over the seeds, and sums of faults; no steps if never reached."""
    clean, verified, believed = sides[CLEAN], sides[VERIFIED], sides[BELIEVED]
    last = min(each.curve[-1][0] for each in (*clean, *verified, *believed))
    learnt = all(map(reached, (*clean, *verified)))
    ratio = _median(clean, verified, lambda one, other: steps_to(other.curve) / steps_to(one.curve))
    return {
        "poisoned_steps_over_clean": round(ratio, 4) if learnt else None,
        "clean_final_reward": _final(clean, last),
        "poisoned_final_reward": _final(verified, last),
        "unverified_final_reward": _final(believed, last),
        "cheats_muted": sum(each.cheats_muted for each in verified),
        "cheats": CHEATS * len(verified),
        "cheats_muted_after_groups": [list(each.made_before_verdict) for each in verified],
        "honest_condemned": sum(each.honest_condemned for outcomes in sides.values() for each in outcomes),
        "forged_groups_trained": sum(each.forged_trained for each in verified),
        "forged_groups_trained_unverified": sum(each.forged_trained for each in believed),
        "seeds": len(clean),
        **{name: attack_figures(clean, sides[name]) for name in sides if name in ATTACKS},
    }


def attack_figures(clean: Sequence[Outcome], attacked: Sequence[Outcome]) -> dict[str, Any]:
    """Return what an attack cost, and how much of what was learnt until then was forged."""
    learnt = all(map(reached, (*clean, *attacked)))
    ratio = _median(clean, attacked, lambda one, other: steps_to(other.curve) / steps_to(one.curve))
    until = [steps_to(each.curve) if reached(each) else math.inf for each in attacked]
    counted = [
        (groups, forged)
        for outcome, last in zip(attacked, until, strict=True)
        for step, groups, forged in outcome.trained
        if step <= math.ceil(min(last, 1e9))
    ]
    forged, groups = sum(each for _, each in counted), sum(each for each, _ in counted)
    return {
        "steps_over_clean": round(ratio, 4) if learnt else None,
        "forged_trained_share": round(forged / groups, 4) if groups else None,
        "final_reward": round(statistics.median(final_reward(each.curve) for each in attacked), 4),
        "cheats_muted": sum(each.cheats_muted for each in attacked),
        "honest_condemned": sum(each.honest_condemned for each in attacked),
    }


def _median(
    ones: Sequence[Outcome], others: Sequence[Outcome], of: Callable[[Outcome, Outcome], float]
) -> float:
    return statistics.median(of(one, other) for one, other in zip(ones, others, strict=True))


def _final(outcomes: Sequence[Outcome], last: int) -> float:
    """Return rewards at the last step measured on all sides."""
    curves = [[point for point in each.curve if point[0] <= last] for each in outcomes]
    return round(statistics.median(map(final_reward, curves)), 4)


def bounds_lines(results: Mapping[str, Any]) -> list[str]:
    """Return one line per bounded figure: its bound, and whether it holds."""
    steps = results["poisoned_steps_over_clean"]
    checks = {
        f"poisoned_steps_over_clean: {steps}, at most {MOST_STEPS}": steps is not None
        and steps <= MOST_STEPS,
        f"honest_condemned: {results['honest_condemned']}, none": results["honest_condemned"] == 0,
        f"cheats_muted: {results['cheats_muted']}, all of {results['cheats']}": results["cheats_muted"]
        == results["cheats"],
        f"unverified_final_reward: {results['unverified_final_reward']}, below {ENOUGH}": results[
            "unverified_final_reward"
        ]
        < ENOUGH,
    }
    for name in (each for each in results if each in ATTACKS):
        ratio, share = results[name]["steps_over_clean"], results[name]["forged_trained_share"]
        checks[f"{name}.steps_over_clean: {ratio}, at most {MOST_ATTACKED_STEPS}"] = (
            ratio is not None and ratio <= MOST_ATTACKED_STEPS
        )
        checks[f"{name}.forged_trained_share: {share}, at most {MOST_FORGED}"] = (
            share is not None and share <= MOST_FORGED
        )
    return [f"{line}: {'holds' if holds else 'MISSED'}" for line, holds in checks.items()]


def table(sides: Sides) -> Table:
    made = Table(
        "swarm",
        "seed",
        f"steps to {ENOUGH}",
        "final",
        "forged",
        "trained on",
        "until",
        "muted after",
        title="Held-out reward with two cheats of four samplers (clean: none), and the cheats' groups",
    )
    for side, outcomes in sides.items():
        for each in outcomes:
            made.add_row(
                side,
                str(each.seed),
                f"{steps_to(each.curve):.0f}" if reached(each) else "never",
                f"{final_reward(each.curve):.3f}",
                str(each.forged_made),
                str(each.forged_trained),
                f"step {each.last_forged_step}" if each.last_forged_step else "",
                ", ".join("never" if count is None else str(count) for count in each.made_before_verdict),
            )
    return made


def draw(sides: Sides, file: Path) -> None:
    """Plot all curves in one picture, one line per seed."""
    import matplotlib as mpl  # noqa: PLC0415 - only a picture needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=120)
    for side, outcomes in sides.items():
        for number, each in enumerate(outcomes):
            points = np.array(each.curve)
            label = side if number == 0 else None
            colour = COLOURS.get(side, f"C{4 + list(sides).index(side)}")
            axes.plot(points[:, 0], points[:, 1], marker=".", color=colour, label=label)
    axes.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="optimiser step", ylabel="held-out reward", ylim=(0.0, 1.0))
    axes.set_title(f"Four samplers: all honest (clean), or {CHEATS} cheats, verified and unverified")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.poisoned", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--steps", type=int, default=None, help=f"default: {STEPS}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--policy", choices=("sampled", "quorum", "self"), default="sampled")
    parser.add_argument("--verifiers", type=int, default=1)
    parser.add_argument(
        "--attacks", nargs="*", choices=tuple(ATTACKS), default=list(ATTACKS), help="default: all"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has kept")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and the picture go")
    wish = parser.parse_args(words)
    name = "poisoned-quick" if wish.quick else "poisoned"
    console, quiet = Console(), Console(stderr=True)
    steps = wish.steps or (10 if wish.quick else STEPS)
    kept = Kept(wish.folder / name, steps, wish.policy, wish.verifiers, resume=wish.resume)
    sides = run_all(wish.seeds, steps, wish.policy, wish.verifiers, quiet.print, wish.attacks, kept)
    runs = [dataclasses.asdict(each) for outcomes in sides.values() for each in outcomes]
    (wish.folder / f"{name}.json").write_text(json.dumps(runs), "utf-8")
    console.print(table(sides))
    results = figures(sides) | {"policy": wish.policy, "verifiers": wish.verifiers}
    for line in bounds_lines(results):
        console.print(line, highlight=False)
    draw(sides, wish.folder / f"{name}.png")
    console.print(f"curves: {wish.folder / f'{name}.png'}", highlight=False, soft_wrap=True)
    print(json.dumps(results))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # that cheats are muted is in the table
    main()
