"""Held-out prompts of the demo: what the model answers at first and at the end.

One completion per prompt, drawn as samplers draw, with the same random numbers both times. The
engine is a process of its own, and ends with the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.engine.base import Engine, SlotRequest, generate_groups, never
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.worker.client import WorkerEngine
from echo_node.errors import StoreError
from echo_node.runs.episodes import responder, scorable
from echo_node.runs.run import Run, read_model
from echo_node.runs.spec import open_run
from echo_node.weights.engine_sync import hand_over, opened
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import derive

AT_ONCE: Final = 32
"""Prompts that the engine answers together."""
SHOWN: Final = 5
"""Prompts whose answers are shown."""
_FIRST: Final = bytes(32)
"""Stands for the head of the first weights, which nobody has published yet."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: last line of its prompt, the answer's first line, its reward."""

    question: str
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Answers of one version to the held-out prompts, in their order."""

    version: int
    step: int
    answers: tuple[Answer, ...]

    @property
    def accuracy(self) -> float:
        """Mean reward."""
        return sum(each.reward for each in self.answers) / max(len(self.answers), 1)


def first_answers(run: Path, prompts: int, engine_class: str, stop: Callable[[], bool]) -> HeldOut:
    """Return the answers of the model as the run begins with it. Blocks."""
    with closing(open_run(run, require=())) as found, closing(_engine(found, engine_class)) as engine:
        engine.start()
        engine.load(_FIRST, read_model(found.folder))
        return HeldOut(0, 0, answers(found, engine, prompts, stop))


def last_answers(
    run: Path, store: Path, prompts: int, engine_class: str, stop: Callable[[], bool]
) -> HeldOut:
    """Return the answers of the newest version in a trainer's store. Blocks.

    Nobody else may use the store.
    """
    with closing(open_run(run, require=())) as found, closing(_engine(found, engine_class)) as engine:
        layout = layout_of(read_model(found.folder))
        with WeightsStore.open(store, found.rules, layout) as weights:
            if weights.tip is None:
                raise StoreError("the demo's trainer has published no version")
            engine.start()
            with opened(weights, weights.tip.id) as held:
                hand_over(held, engine)
            message = weights.tip.message
            return HeldOut(message.version, message.step, answers(found, engine, prompts, stop))


def _engine(run: Run, engine_class: str) -> WorkerEngine:
    return WorkerEngine(EngineSpec(engine_class, run.folder, rows=AT_ONCE))


def answers(run: Run, engine: Engine, prompts: int, stop: Callable[[], bool] = never) -> tuple[Answer, ...]:
    """Return the answers of what the engine has loaded to the first held-out prompts.

    Blocks.
    """
    found: list[Answer] = []
    for first in range(0, prompts, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, prompts))
        found += _some(run, engine, [derive("demo held-out", n.to_bytes(8)) for n in numbers], stop)
    return tuple(found)


def _some(run: Run, engine: Engine, keys: Sequence[bytes], stop: Callable[[], bool]) -> list[Answer]:
    asked = run.prompts(keys, held_out=True)
    requests = [
        SlotRequest(ids, key, 1, run.limits, turns=run.turn_rules)
        for key, (_, ids) in zip(keys, asked, strict=True)
    ]
    found = []
    respond = responder(run, [prompt for prompt, _ in asked])
    drawn = generate_groups(engine, requests, stop=stop, respond=respond)
    for (prompt, _), draws in zip(asked, drawn, strict=True):
        (score,) = run.scores(prompt, scorable(run, prompt, draws))
        text = run.tokenizer.decode(draws[0].ids, run.limits.end_tokens)
        found.append(Answer(prompt.text.rpartition("\n")[2], text.partition("\n")[0].strip(), score.value))
    return found
