"""How good a version is: the mean reward of its completions to prompts that no training ever sees.

The prompts are the run's own, from keys that no slot can have; everybody who measures a version asks the same ones, with
the same luck. What was measured is kept beside the weights, so that the best version can be told. It trains nothing.
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
from echo_node.run import Run
from echo_node.weights.handing import hand_over, opened
from echo_node.weights.journal import Head
from echo_node.weights.store import WeightsStore
from protocol import derive

PROMPTS: Final = 200
AT_ONCE: Final = 32
FILE: Final = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One version's, with the standard error of its mean."""

    version: int
    step: int
    prompts: int
    reward: float
    error: float


def held_out_keys(run: Run, prompts: int) -> list[bytes]:
    """Slots that nobody can be given: their keys are made in another way than those of heads."""
    return [derive("held-out", run.id, number.to_bytes(8)) for number in range(prompts)]


def evaluate(
    run: Run,
    store: WeightsStore,
    head: Head,
    engine: Engine,
    *,
    prompts: int = PROMPTS,
    tell: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Measure the version of a head, one completion for each prompt. Blocks."""
    with opened(store, head.id) as held:
        hand_over(held, engine)
    rewards: list[float] = []
    for keys in _pieces(held_out_keys(run, prompts)):
        asked = run.prompts(keys)
        requests = [SlotRequest(ids, key, 1, run.limits) for key, (_, ids) in zip(keys, asked, strict=True)]
        for (prompt, _), draws in zip(asked, generate_groups(engine, requests), strict=True):
            rewards += [score.value for score in run.scores(prompt, [draw.ids for draw in draws])]
        tell(len(rewards))
    error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    told = head.message
    return Evaluation(told.version, told.step, len(rewards), statistics.fmean(rewards), error)


def _pieces(keys: list[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(keys), AT_ONCE):
        yield keys[first : first + AT_ONCE]


def remember(folder: Path, found: Evaluation) -> None:
    """Keep a measurement in a run's folder."""
    with boundary(StoreError, f"writing to {folder / FILE}"), (folder / FILE).open("a") as lines:
        lines.write(json.dumps(asdict(found)) + "\n")


def remembered(folder: Path) -> list[Evaluation]:
    """What was measured in a run's folder, the newest of each version, in their order."""
    file = folder / FILE
    if not file.is_file():
        return []
    with boundary(StoreError, f"reading {file}", advice="remove it, and measure again"):
        found = [Evaluation(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    return [each for _, each in sorted({each.version: each for each in found}.items())]
