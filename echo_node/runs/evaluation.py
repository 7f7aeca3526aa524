"""Evaluate a version: the mean reward on held-out prompts.

The prompts are the run's own, from keys that no slot can have; everyone who measures a version
uses the same prompts and the same random numbers. Results are kept beside the weights, so that
the best version is known.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from echo_node.engine.base import Engine, SlotRequest, generate_groups
from echo_node.errors import StoreError, boundary
from echo_node.runs.run import Run
from echo_node.weights.chain_log import Head
from echo_node.weights.engine_sync import hand_over, opened
from echo_node.weights.store import WeightsStore
from protocol import derive

PROMPTS: Final = 200
AT_ONCE: Final = 32
FILE: Final = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward of one version, with its standard error."""

    version: int
    step: int
    prompts: int
    reward: float
    error: float


def held_out_keys(run: Run, prompts: int) -> list[bytes]:
    """Return the keys of held-out slots, derived so that no head can assign them."""
    return [derive("held-out", run.id, number.to_bytes(8)) for number in range(prompts)]


def evaluate(
    run: Run,
    store: WeightsStore,
    head: Head,
    engine: Engine,
    *,
    prompts: int = PROMPTS,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Measure the version of a head, one completion per prompt. Blocks."""
    with opened(store, head.id) as held:
        hand_over(held, engine)
    rewards: list[float] = []
    for keys in _chunks(held_out_keys(run, prompts)):
        asked = run.prompts(keys, held_out=True)
        requests = [SlotRequest(ids, key, 1, run.limits) for key, (_, ids) in zip(keys, asked, strict=True)]
        for (prompt, _), draws in zip(asked, generate_groups(engine, requests), strict=True):
            rewards += [score.value for score in run.scores(prompt, [draw.ids for draw in draws])]
        on_progress(len(rewards))
    error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    message = head.message
    return Evaluation(message.version, message.step, len(rewards), statistics.fmean(rewards), error)


def _chunks(keys: list[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(keys), AT_ONCE):
        yield keys[first : first + AT_ONCE]


def append_evaluation(folder: Path, found: Evaluation) -> None:
    """Append a measurement to the run's folder."""
    with boundary(StoreError, f"writing to {folder / FILE}"), (folder / FILE).open("a") as lines:
        lines.write(json.dumps(asdict(found)) + "\n")


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Read the measurements of a run's folder, the newest of each version, by version."""
    file = folder / FILE
    if not file.is_file():
        return []
    with boundary(StoreError, f"reading {file}", advice="remove it, and measure again"):
        found = [Evaluation(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    return [each for _, each in sorted({each.version: each for each in found}.items())]
