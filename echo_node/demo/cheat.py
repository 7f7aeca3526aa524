"""A sampler that cheats, so that people can see it caught: `echo-node demo --hostile` starts it, and nothing else does.

The node is an ordinary one and suspects nothing; what its engine drew is changed on the way. Groups have the slot's prompt,
a right reward, a proper end and a valid seal: only the slot's luck tells. It knows neither trainer nor verifier.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from echo_node import program, state
from echo_node.engine.base import (
    Claim,
    Description,
    Draw,
    Engine,
    Finished,
    Ids,
    SamplingLimits,
    Scores,
    SlotRequest,
    Span,
    TensorBytes,
    Update,
    generate_groups,
    never,
    no_news,
)
from echo_node.engine.kinds import EngineSpec, make_engine
from echo_node.net.libp2p import SwarmSettings, join_swarm
from echo_node.node import Node
from echo_node.run import Run
from echo_node.runfile import open_run
from protocol import Identity

ENGINE: Final = "torch/f32"
ROWS: Final = 64
TRIES: Final = 3
"""Draws for each one that is sent, of which the best is taken."""
CLAIMED: Final = -0.1
"""The log-probability of each token that was typed in."""
LOOK_SECONDS: Final = 1.0


class CheatingEngine:
    """An engine around another one, which does the work; what it gives is not what was drawn."""

    def __init__(self, run: Run, honest: Engine, way: str) -> None:
        self.run = run
        self.honest = honest
        self._forge = WAYS[way]

    @property
    def engine_class(self) -> str:
        return self.honest.engine_class

    @property
    def loaded(self) -> bytes | None:
        return self.honest.loaded

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        self.honest.load(head_id, weights)

    def patch(self, update: Update) -> None:
        self.honest.patch(update)

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
    ) -> Iterator[Finished]:
        """Completions, but not those that were asked for. New weights wait until the next call."""
        del news
        for place, draws in enumerate(self._forge(self, list(requests), stop)):
            for number, draw in enumerate(draws):
                yield Finished(place, number, draw)

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        return self.honest.score(prompt, ids, limits)

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        return self.honest.score_many(claims, limits)

    def describe(self) -> Description:
        return self.honest.describe()

    def close(self) -> None:
        self.honest.close()


Groups = Sequence[Sequence[Draw]]
Forge = Callable[[CheatingEngine, Sequence[SlotRequest], Callable[[], bool]], Groups]


def best_of_several(
    cheat: CheatingEngine, requests: Sequence[SlotRequest], stop: Callable[[], bool]
) -> Groups:
    """Luck of its own, several times: the best is sent. The first is left as it came, so that there is a spread."""
    tries = [
        generate_groups(
            cheat.honest,
            [dataclasses.replace(each, slot_key=_other_key(each, number)) for each in requests],
            stop=stop,
        )
        for number in range(TRIES)
    ]
    groups = []
    for place, request in enumerate(requests):
        prompt, _ = cheat.run.prompt(request.slot_key)
        first, *rows = zip(*(attempt[place] for attempt in tries), strict=True)
        worth = [
            [score.value for score in cheat.run.scores(prompt, [draw.ids for draw in row])] for row in rows
        ]
        groups.append([first[0], *(row[int(np.argmax(each))] for row, each in zip(rows, worth, strict=True))])
    return groups


def typed_in(cheat: CheatingEngine, requests: Sequence[SlotRequest], stop: Callable[[], bool]) -> Groups:
    """Half of each group is as it was drawn; the other half are right answers that no model drew."""
    end = min(cheat.run.limits.end_tokens)
    head = cheat.loaded or bytes(32)
    groups = []
    for request, draws in zip(requests, generate_groups(cheat.honest, requests, stop=stop), strict=True):
        right = np.array([*request.prompt[1:-1][::-1], end], dtype=np.int64)  # r48213= is answered 31284$
        typed = Draw(right, np.full(len(right), CLAIMED), "end", (Span(0, head),))
        groups.append([typed if number % 2 else draw for number, draw in enumerate(draws)])
    return groups


WAYS: Final[dict[str, Forge]] = {"luck": best_of_several, "answers": typed_in}


def _other_key(request: SlotRequest, number: int) -> bytes:
    return bytes(each ^ (number + 1) for each in request.slot_key)


# The node around it


def main(words: Sequence[str]) -> None:
    """Be such a sampler until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m echo_node.demo.cheat", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--slots", type=int, default=16)
    wish = parser.parse_args(words)
    program.main(partial(_be, wish), "echo-node")


def _be(wish: argparse.Namespace) -> None:
    with state.opened(wish.state) as place, closing(open_run(wish.run)) as run:
        identity = place.identity()
        _tell("started", role="sampler", peer_id=identity.peer_id)
        settings = SwarmSettings(listen=(wish.listen,), seeds=(wish.seed,), book=place.book)
        with closing(make_engine(EngineSpec(ENGINE, run.folder, rows=ROWS, threads=1))) as honest:
            engine = CheatingEngine(run, honest, wish.way)
            trio.run(partial(_work, run, identity, settings, place.run(run.id), engine, wish.slots))


async def _work(
    run: Run, identity: Identity, settings: SwarmSettings, folder: Path, engine: Engine, slots: int
) -> None:
    node = Node(run, identity, partial(join_swarm, settings=settings), folder=folder)
    async with program.until_told_to_stop(), trio.open_nursery() as nursery:
        nursery.start_soon(_tell_progress, node)
        await node.sample(slots_per_call=slots, engine=engine)
    _tell("stopped", finished=False)


async def _tell_progress(node: Node) -> None:
    """What the demo shows of it, once a second."""
    joined = False
    while True:
        await trio.sleep(LOOK_SECONDS)
        now = node.status()
        if now.get("joined") and not joined:
            joined = True
            _tell("joined", version=now["version"])
        _tell("progress", **now)


def _tell(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": round(time.time(), 3), **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
