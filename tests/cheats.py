"""Cheating samplers, for tests of their detection."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np

from echo_node.engine.base import Engine, SlotRequest, generate_groups
from echo_node.sampler.rollout import Rollout


class OwnLuck:
    """An engine that draws with its own keys, as a sampler does that retries for better rewards.

    In one of two hundred groups of the embedded task other uniforms draw just what the slot's do,
    and nobody could tell: the first draw here is never the right one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def generate(self, requests, **more):
        asked = list(requests)
        others = [_other_luck(each) for each in asked]
        right = self._first_draws(asked)
        while same := [at for at, drawn in enumerate(self._first_draws(others)) if drawn == right[at]]:
            for at in same:
                others[at] = _other_luck(others[at])
        yield from self._engine.generate(others, **more)

    def _first_draws(self, requests: list[SlotRequest]) -> list[list[int]]:
        alone = [dataclasses.replace(each, group_size=1) for each in requests]
        return [draw.ids.tolist() for (draw,) in generate_groups(self._engine, alone)]


def _other_luck(request: SlotRequest) -> SlotRequest:
    return dataclasses.replace(request, slot_key=hashlib.sha256(request.slot_key).digest())


class ChosenGroups:
    """Samplers that draw honestly and send only what they like of it.

    `cheats` maps the key of a sampler to its rule, which takes the head and the drawn groups and
    returns those that are sent. Installed in place of `Rollout.stream`, so that all else is a real
    sampler's: it announces its slots as everybody does.
    """

    def __init__(self, cheats):
        self._cheats = cheats
        self._stream = Rollout.stream

    def install(self, monkeypatch) -> None:
        stream, cheats = self._stream, self._cheats

        def chosen(rollout, head, blocks, *more, **others):
            rule = cheats.get(rollout._identity.public)
            if rule is None:
                yield from stream(rollout, head, blocks, *more, **others)
                return
            block = next(iter(blocks))  # to choose, it must have drawn all that it announced
            groups = sorted(stream(rollout, head, [block], *more, **others), key=lambda group: group.slot)
            yield from rule(head, groups)

        monkeypatch.setattr(Rollout, "stream", chosen)


def better_half(_head, groups):
    """The half of the slots with the higher rewards."""
    best = sorted(groups, key=lambda group: -np.mean(group.message.rewards))[: len(groups) // 2]
    return sorted(best, key=lambda group: group.slot)


class DiesAtRandom:
    """No cheat: a volunteer whose machine dies at any moment, whatever it has drawn."""

    def __init__(self, seed: int) -> None:
        self._luck = random.Random(seed)

    def __call__(self, _head, groups):
        return groups[: self._luck.randint(0, len(groups))] if self._luck.random() < 0.4 else groups
