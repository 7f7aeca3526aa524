"""Cheating sampler for `echo-node demo --hostile`, which shows how it is caught.

The node is an ordinary one; only the engine's completions are replaced. Its groups have the slot's
prompt, a right reward, a proper end and a valid seal: only the seed replay finds them out.
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

from echo_node.engine.base import (
    Claim,
    Description,
    Draw,
    Engine,
    Finished,
    Ids,
    Respond,
    SamplingLimits,
    Scores,
    SlotRequest,
    Span,
    TensorBytes,
    Update,
    generate_groups,
    never,
    no_environment,
    no_news,
)
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.node import Node
from echo_node.runs.run import Run
from echo_node.runs.spec import open_run
from echo_node.runtime import exit_codes
from echo_node.storage import state_dir
from protocol import Identity

ENGINE: Final = "torch/f32"
ROWS: Final = 64
"""Concurrent completions of the engine."""
TRIES: Final = 3
"""Draws per completion, of which the best is sent."""
CLAIMED: Final = -0.1
"""Claimed log-probability of each token of a typed answer."""
LOOK_SECONDS: Final = 1.0
"""Seconds between two progress events."""


class CheatingEngine:
    """Wrapper of an honest engine that returns forged completions."""

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
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Yield forged completions of one turn; new weights wait until the next call."""
        del news, respond
        for index, draws in enumerate(self._forge(self, list(requests), stop)):
            for number, draw in enumerate(draws):
                yield Finished(index, number, draw)

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
    """Draw several times with other seeds and send the best.

    The first completion is kept, so that the rewards of the group differ.
    """
    tries = [
        generate_groups(
            cheat.honest,
            [dataclasses.replace(each, slot_key=_other_key(each, number)) for each in requests],
            stop=stop,
        )
        for number in range(TRIES)
    ]
    groups = []
    for index, request in enumerate(requests):
        prompt, _ = cheat.run.prompt(request.slot_key)
        first, *rows = zip(*(attempt[index] for attempt in tries), strict=True)
        rewards = [
            [score.value for score in cheat.run.scores(prompt, [draw.ids for draw in row])] for row in rows
        ]
        best = [row[int(np.argmax(each))] for row, each in zip(rows, rewards, strict=True)]
        groups.append([first[0], *best])
    return groups


def typed_answers(cheat: CheatingEngine, requests: Sequence[SlotRequest], stop: Callable[[], bool]) -> Groups:
    """Replace every second completion by the right answer, which no model drew."""
    end = min(cheat.run.limits.end_tokens)
    head = cheat.loaded or bytes(32)
    groups = []
    for request, draws in zip(requests, generate_groups(cheat.honest, requests, stop=stop), strict=True):
        right = np.array([*request.prompt[1:-1][::-1], end], dtype=np.int64)  # r48213= is answered 31284$
        typed = Draw(right, np.full(len(right), CLAIMED), "end", (Span(0, head),))
        groups.append([typed if number % 2 else draw for number, draw in enumerate(draws)])
    return groups


WAYS: Final[dict[str, Forge]] = {"luck": best_of_several, "answers": typed_answers}


def _other_key(request: SlotRequest, number: int) -> bytes:
    return bytes(each ^ (number + 1) for each in request.slot_key)


# The node around it


def main(words: Sequence[str]) -> None:
    """Run a cheating sampler until it is signalled to stop."""
    parser = argparse.ArgumentParser(prog="python -m echo_node.demo.cheat", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args(words)
    exit_codes.main(partial(_run, options), "echo-node")


def _run(options: argparse.Namespace) -> None:
    with state_dir.opened(options.state) as state, closing(open_run(options.run, require=())) as run:
        identity = state.identity()
        _emit("started", role="sampler", peer_id=identity.peer_id)
        settings = SwarmSettings(listen=(options.listen,), seeds=(options.seed,), book=state.book)
        with closing(make_engine(EngineSpec(ENGINE, run.folder, rows=ROWS, threads=1))) as honest:
            engine = CheatingEngine(run, honest, options.way)
            trio.run(partial(_work, run, identity, settings, state.run(run.id), engine, options.slots))


async def _work(
    run: Run, identity: Identity, settings: SwarmSettings, folder: Path, engine: Engine, slots: int
) -> None:
    node = Node(run, identity, partial(join_swarm, settings=settings), folder=folder)
    async with exit_codes.until_stop_signal(), trio.open_nursery() as nursery:
        nursery.start_soon(_emit_progress, node)
        await node.sample(slots_per_call=slots, engine=engine)
    _emit("stopped", finished=False)


async def _emit_progress(node: Node) -> None:
    """Emit the progress that the demo shows, once a second."""
    joined = False
    while True:
        await trio.sleep(LOOK_SECONDS)
        now = node.status()
        if now.get("joined") and not joined:
            joined = True
            _emit("joined", version=now["version"])
        _emit("progress", **now)


def _emit(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": round(time.time(), 3), **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
