"""Engines of cheating samplers, for tests of their detection."""

from __future__ import annotations

import dataclasses
import hashlib

from echo_node.engine.base import Engine, SlotRequest, generate_groups


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
