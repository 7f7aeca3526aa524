"""Evaluate a version: the mean reward on held-out prompts.

The prompts are the run's own, from keys that no slot can have; everyone who measures a version
uses the same prompts and the same random numbers. Results are kept beside the weights, so that
the best version is known.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from echo_node.contract import Prompt
from echo_node.engine.base import Engine, Ids, SlotRequest, generate_groups, never
from echo_node.errors import ConfigError, ContractError
from echo_node.runs.episodes import responder, scorable
from echo_node.runs.run import Run
from echo_node.telemetry.evaluations import Evaluation
from echo_node.weights.chain_log import Head
from echo_node.weights.engine_sync import hand_over, opened
from echo_node.weights.store import WeightsStore
from protocol import derive

T = TypeVar("T")
PROMPTS: Final = 200
AT_ONCE: Final = 32
_TRIES: Final = 8
"""Keys tried per wanted prompt: prompts of a small data set repeat, and each counts once."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A held-out prompt with its token ids, and the key of its random numbers."""

    key: bytes
    prompt: Prompt
    ids: Ids


def held_out_keys(run: Run, prompts: int) -> list[bytes]:
    """Return the keys of held-out slots, derived so that no head can assign them."""
    return [derive("held-out", run.id, number.to_bytes(8)) for number in range(prompts)]


def held_out_prompts(run: Run, prompts: int) -> list[HeldOutPrompt]:
    """Return distinct held-out prompts, at most as many as the run has."""
    found: dict[bytes, HeldOutPrompt] = {}
    for keys in _chunks(held_out_keys(run, _TRIES * prompts), max(prompts, AT_ONCE)):
        for key, (prompt, ids) in zip(keys, run.prompts(keys, held_out=True), strict=True):
            found.setdefault(ids.tobytes(), HeldOutPrompt(key, prompt, ids))
        if len(found) >= prompts:
            break
    return list(found.values())[:prompts]


def evaluate(
    run: Run,
    store: WeightsStore,
    head: Head,
    engine: Engine,
    prompts: Sequence[HeldOutPrompt],
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    stop: Callable[[], bool] = never,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Measure the version of a head, one completion per prompt. Blocks.

    Decoding is as the run's samplers do it, unless given. `stop` is called before each token, and
    raises `EngineStoppedError` if true.
    """
    if not prompts:
        raise ContractError("the run has no held-out prompts", advice="its contract must make some")
    with opened(store, head.id) as held:
        hand_over(held, engine)
    limits = dataclasses.replace(
        run.limits,
        temperature=run.limits.temperature if temperature is None else temperature,
        max_tokens=run.limits.max_tokens if max_tokens is None else max_tokens,
    )
    rules = run.turn_rules
    if rules is not None and max_tokens not in {None, run.limits.max_tokens}:
        raise ConfigError("an evaluation with turns has the run's max_tokens", advice="leave max_tokens out")
    rewards: list[float] = []
    for chunk in _chunks(prompts, AT_ONCE):
        requests = [SlotRequest(each.ids, each.key, 1, limits, turns=rules) for each in chunk]
        respond = responder(run, [each.prompt for each in chunk])
        found = generate_groups(engine, requests, stop=stop, respond=respond)
        for each, draws in zip(chunk, found, strict=True):
            answers = scorable(run, each.prompt, draws)
            rewards += [score.value for score in run.scores(each.prompt, answers)]
        on_progress(len(rewards))
    error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    return Evaluation(
        head.message.version,
        head.message.step,
        len(rewards),
        statistics.fmean(rewards),
        error,
        head=head.id.hex(),
        temperature=limits.temperature,
        max_tokens=limits.max_tokens,
        engine=engine.engine_class,
    )


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
