"""Engines with turns: rows rest and are extended, in any batch, in flight and through the pipe."""

from __future__ import annotations

import numpy as np
import pytest

from echo_node.engine.base import (
    EngineError,
    SamplingLimits,
    SlotRequest,
    TurnReply,
    generate_groups,
)
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.worker.client import WorkerEngine
from echo_node.models import embedded
from echo_node.runs.run import read_model
from protocol.sampling import uniforms
from protocol.turns import TurnRules

HEAD = b"h" * 32
END = 12
LIMITS = SamplingLimits(40, 1.0, frozenset({END}), 16)
RULES = TurnRules(end=END, end_tokens=frozenset({END}), environment=20, max_tokens=40, most=5, tokens=6)


def requests(count: int = 9) -> list[SlotRequest]:
    """Requests with turns, and every fourth without."""
    luck = np.random.default_rng(3)
    return [
        SlotRequest(
            luck.integers(0, 10, 5 + n % 3), luck.bytes(32), 6, LIMITS, turns=RULES if n % 4 else None
        )
        for n in range(count)
    ]


def respond(ended):
    """Replies of one to three tokens that follow from the transcript alone."""
    found = []
    for each in ended:
        luck = np.random.default_rng([int(each.ids.sum()), each.turn, each.ids.size])
        ids = luck.integers(0, 10, 1 + int(each.ids.sum()) % 3)
        if not RULES.fits(ids.size, each.ids.size, each.environment):
            found.append(TurnReply(None, "length"))
        else:
            found.append(TurnReply(None, "done") if luck.random() < 0.1 else TurnReply(ids))
    return found


def flat(groups):
    return [(d.ids.tolist(), d.finish, d.spans) for group in groups for d in group]


def check(engine, asked, groups) -> int:
    """Replay every drawn token; return the number of replies."""
    replies = 0
    for request, group in zip(asked, groups, strict=True):
        for number, drawn in enumerate(group):
            luck = uniforms(request.slot_key, number, drawn.ids.size)
            far = engine.score(request.prompt, drawn.ids, LIMITS).replay(luck).d
            cuts = [*(span.start for span in drawn.spans), drawn.ids.size]
            for span, end in zip(drawn.spans, cuts[1:], strict=True):
                if span.head_id is None:
                    replies += 1
                    assert not drawn.logprobs[span.start : end].any()
                else:
                    assert far[span.start : end].max() < 1e-5
    return replies


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f32"])
def test_an_extended_row_goes_on_as_a_fresh_prefill_would(engine_class, rows):
    engine = make_engine(EngineSpec(engine_class, embedded.folder(), rows=rows, threads=1))
    try:
        engine.load(HEAD, read_model(embedded.folder()))
        asked = requests(9 if rows > 2 else 3)
        assert check(engine, asked, generate_groups(engine, asked, respond=respond)) > 20
    finally:
        engine.close()


def test_a_worker_gives_the_same_episodes_as_an_engine_in_this_process():
    here = make_engine(EngineSpec("torch/f32", embedded.folder(), rows=7, threads=1))
    with WorkerEngine(EngineSpec("torch/f32", embedded.folder(), rows=7, threads=1)) as there:
        for engine in (here, there):
            engine.load(HEAD, read_model(embedded.folder()))
        asked = requests(4)
        assert flat(generate_groups(there, asked, respond=respond)) == flat(
            generate_groups(here, asked, respond=respond)
        )
        with pytest.raises(EngineError, match="no environment"):
            generate_groups(there, asked)
        assert generate_groups(there, asked[:1])
    here.close()


def test_a_reply_beyond_the_limits_is_an_error_of_whoever_answers():
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), rows=7, threads=1))
    engine.load(HEAD, read_model(embedded.folder()))
    for ids in ([], [16], [-1], [1] * 40):
        with pytest.raises(EngineError, match="does not fit"):
            generate_groups(
                engine,
                requests(2),
                respond=lambda ended, ids=ids: [TurnReply(np.array(ids, np.int64))] * len(ended),
            )
    engine.close()


def test_a_failed_environment_ends_its_completions_and_no_others():
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), rows=7, threads=1))
    engine.load(HEAD, read_model(embedded.folder()))

    def void_of_the_second(ended):
        return [
            TurnReply(None, "void") if each.request == 1 else reply
            for each, reply in zip(ended, respond(ended), strict=True)
        ]

    asked = requests(3)
    groups = generate_groups(engine, asked, respond=void_of_the_second)
    assert "void" in {drawn.finish for drawn in groups[1]}
    whole = generate_groups(engine, asked, respond=respond)
    assert flat(groups[2:]) == flat(whole[2:])
    engine.close()
