"""Cheating samplers: each takes a slot and returns a sealed group.

They meet the verifier on the stage of `forgers_stage`, which this room uses and does not explain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.forgers_stage import OTHER, Pick, Stage
from benchmarks.forgers_weights import Weights, noised, nudged, scaled
from echo_node.engine.base import Draw, SlotRequest
from protocol.digest import derive
from protocol.sampling import uniforms


def by_luck(stage: Stage, slot: int, change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Pick:
    """Sample with the slot's own draws from a changed distribution."""
    bounds = stage.run.limits
    size = stage.run.manifest.sampling.group_size
    luck = [uniforms(stage.key(slot), row, bounds.max_tokens) for row in range(size)]

    def pick(chance: NDArray[np.float64], row: int, place: int) -> int:
        cumulative = np.cumsum(change(chance))
        return int(np.searchsorted(cumulative, luck[row][place] * cumulative[-1], side="right"))

    return pick


def at_temperature(factor: float) -> Callable[[Stage, int], bytes]:
    def forge(stage: Stage, slot: int) -> bytes:
        return stage.group(
            slot, stage.picked(slot, by_luck(stage, slot, lambda chance: chance ** (1 / factor)))
        )

    return forge


def top_p(stage: Stage, slot: int) -> bytes:
    def nucleus(chance: NDArray[np.float64]) -> NDArray[np.float64]:
        order = np.argsort(-chance)
        kept = order[: int(np.searchsorted(np.cumsum(chance[order]), 0.9)) + 1]
        cut = np.zeros_like(chance)
        cut[kept] = chance[kept]
        return cut

    return stage.group(slot, stage.picked(slot, by_luck(stage, slot, nucleus)))


def greedy(stage: Stage, slot: int) -> bytes:
    return stage.group(slot, stage.picked(slot, lambda chance, _row, _place: int(chance.argmax())))


def with_luck_of_its_own(stage: Stage, slot: int, attempt: int = 0) -> SlotRequest:
    """Sample the slot's prompt with draws of another key."""
    asked = stage.request(slot)
    return dataclasses.replace(asked, slot_key=derive("slot", asked.slot_key, bytes([attempt])))


def without_seed(stage: Stage, slot: int) -> bytes:
    return stage.group(slot, stage.drawn_for(with_luck_of_its_own(stage, slot)))


def best_of_8(stage: Stage, slot: int) -> bytes:
    """Send the best of eight tries for each completion, by reward, then likelihood."""
    asked, _ = stage.run.prompt(stage.key(slot))
    requests = [with_luck_of_its_own(stage, slot, attempt) for attempt in range(8)]
    stage.prepare(requests)

    def best(tries: Sequence[Draw]) -> Draw:
        worth = [score.value for score in stage.run.scores(asked, [draw.ids for draw in tries])]
        return max(zip(worth, tries, strict=True), key=lambda one: (one[0], one[1].logprobs.mean()))[1]

    return stage.group(slot, [best(row) for row in zip(*map(stage.drawn_for, requests), strict=True)])


def edited(stage: Stage, slot: int) -> bytes:
    """Four tokens of an honest completion are others; few as it has, half of them in short ones."""
    luck = np.random.default_rng(slot)
    bounds = stage.run.limits
    texts = []
    for draw in stage.draws(slot):
        ids = draw.ids.copy()
        inner = np.arange(max(1, ids.size - 1))
        for place in luck.choice(inner, min(4, (ids.size + 1) // 2), replace=False):
            options = [
                token for token in luck.integers(0, bounds.vocab_size, 64) if token not in bounds.end_tokens
            ]
            ids[place] = next(token for token in options if token != ids[place])
        texts.append(ids.tolist())
    return stage.group(slot, stage.prefilled(slot, texts))


def written_elsewhere(stage: Stage, slot: int) -> bytes:
    """Send the right answer with the log-probabilities of a prefill."""
    asked, _ = stage.run.prompt(stage.key(slot))
    text = stage.run.tokenizer.encode(stage.run.contract.answer(asked)).tolist()
    answer = [*text, min(stage.run.limits.end_tokens)][: stage.run.limits.max_tokens]
    return stage.group(slot, stage.prefilled(slot, [answer]) * stage.run.manifest.sampling.group_size)


def copied(stage: Stage, slot: int) -> bytes:
    """Send another peer's completions for its slot as one's own."""
    return stage.group(slot, stage.drawn_for(stage.request(slot, sampler=OTHER)))


def replayed(stage: Stage, slot: int) -> bytes:
    """Last slot's group once more, as this slot's."""
    before = max(slot - 1, 0) if slot else 1
    return stage.group(slot, stage.draws(before), prompt=stage.request(before).prompt)


def easy_prompt(stage: Stage, slot: int) -> bytes:
    """Answer a prompt of its own choice."""
    easy = stage.request(slot + 7).prompt
    asked = dataclasses.replace(stage.request(slot), prompt=easy)
    asked = dataclasses.replace(asked, slot_key=derive("slot", asked.slot_key))  # whatever its luck
    return stage.group(slot, stage.drawn_for(asked), prompt=easy)


def false_reward(stage: Stage, slot: int) -> bytes:
    draws = stage.draws(slot)
    asked, _ = stage.run.prompt(stage.key(slot))
    honest = [score.value for score in stage.run.scores(asked, [draw.ids for draw in draws])]
    return stage.group(slot, draws, rewards=[1.0 - reward for reward in honest])


def inflated(stage: Stage, slot: int) -> bytes:
    """Extend each completion beyond its end, or cut one that ran to the limit."""
    bounds = stage.run.limits
    end = min(bounds.end_tokens)
    texts = []
    for draw in stage.draws(slot):
        ids = draw.ids.tolist()
        if draw.finish == "end":
            filler = next(token for token in range(bounds.vocab_size) if token not in bounds.end_tokens)
            ids = [*ids[:-1], *[filler] * (bounds.max_tokens - len(ids) + 1)]
        else:
            ids = [*ids[:-1], end]
        texts.append(ids)
    return stage.group(slot, stage.prefilled(slot, texts))


def wrong_finish(stage: Stage, slot: int) -> bytes:
    draws = [
        dataclasses.replace(draw, finish="length" if draw.finish == "end" else "end")
        for draw in stage.draws(slot)
    ]
    return stage.group(slot, draws)


def made_up_logprobs(stage: Stage, slot: int) -> bytes:
    luck = np.random.default_rng(slot)
    draws = [
        dataclasses.replace(draw, logprobs=-luck.exponential(1.0, draw.ids.size))
        for draw in stage.draws(slot)
    ]
    return stage.group(slot, draws)


def zero_logprobs(stage: Stage, slot: int) -> bytes:
    draws = [dataclasses.replace(draw, logprobs=np.zeros(draw.ids.size)) for draw in stage.draws(slot)]
    return stage.group(slot, draws)


def luckier_version(stage: Stage, slot: int) -> bytes:
    """Send the better of two honest groups drawn under two valid heads."""
    older = stage.other_engine("older version", stage.engine_class, lambda: stage.older)
    found = []
    for head, engine in ((stage.head.id, stage.sampler), (stage.old_head.id, older)):
        asked, _ = stage.run.prompt(stage.key(slot, head))
        draws = stage.drawn_for(stage.request(slot, head), engine)
        worth = sum(score.value for score in stage.run.scores(asked, [draw.ids for draw in draws]))
        found.append((worth, head, draws))
    _, head, draws = max(found, key=lambda one: one[0])
    return stage.group(slot, draws, head=head)


def with_weights(
    name: str, make: Callable[[Stage], Weights], engine_class: str | None = None
) -> Callable[[Stage, int], bytes]:
    """Return a forger whose engine has other weights or another weight type."""

    def forge(stage: Stage, slot: int) -> bytes:
        engine = stage.other_engine(name, engine_class or stage.engine_class, partial(make, stage))
        return stage.group(slot, stage.draws(slot, engine))

    return forge


def steps_behind(stage: Stage, steps: int) -> Weights:
    """Return weights of some steps ago, if a step moves one in a hundred by one ulp."""
    return nudged(stage.newest, 0.01, steps=steps)


DISTANCES: dict[str, Callable[[Stage], Weights]] = {
    "older version": lambda stage: stage.older,
    "older by 4 steps": lambda stage: steps_behind(stage, 4),
    "older by 16 steps": lambda stage: steps_behind(stage, 16),
    "older by 64 steps": lambda stage: steps_behind(stage, 64),
    "weights off by 0.1 %": lambda stage: scaled(stage.newest, 0.001),
    "weights off by 1 %": lambda stage: scaled(stage.newest, 0.01),
}
"""Weights at growing distances from those that are named. An older version is one step behind."""
FORGERS: dict[str, Callable[[Stage, int], bytes]] = {
    "wrong model": with_weights("wrong model", lambda stage: noised(stage.newest, 0.3)),
    **{name: with_weights(name, make) for name, make in DISTANCES.items()},
    "q4 as f16": with_weights("q4 as f16", lambda stage: stage.newest, "llama/q4_0"),
    "temperature 0.8": at_temperature(0.8),
    "temperature 1.2": at_temperature(1.2),
    "top-p 0.9": top_p,
    "greedy": greedy,
    "own luck": without_seed,
    "best of 8": best_of_8,
    "edited": edited,
    "written elsewhere": written_elsewhere,
    "copied": copied,
    "replayed": replayed,
    "wrong prompt": easy_prompt,
    "false reward": false_reward,
    "inflated length": inflated,
    "wrong finish": wrong_finish,
    "made-up log-probabilities": made_up_logprobs,
    "log-probabilities of zero": zero_logprobs,
    "luckier version": luckier_version,
}
COUNTED_SLOWLY = (*DISTANCES, "luckier version")
"""Forgers that one group cannot reveal: too near to honest, or honest except for the choice."""
