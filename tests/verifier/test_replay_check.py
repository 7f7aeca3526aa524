"""Forward passes of a check: long completions in pieces, short ones together, equal results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.forgers import FORGERS
from benchmarks.forgers_stage import Stage
from echo_node.engine.base import Claim
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.verifier import replay_check
from echo_node.verifier.replay_check import PASS, Piece, passes
from protocol.trajectory import Completion, Stretch
from tests.engine import models
from tests.engine.models import HEAD, LIMITS

ONE, TWO = b"1" * 32, b"2" * 32


@pytest.fixture(scope="module")
def stage():
    opened = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1)
    yield opened
    opened.close()


def completion(length):
    ids = np.zeros(length, np.int64)
    return Completion(ids, np.zeros(length), "length", 0.0, (Stretch(0, length, 0),))


def cut(*lengths):
    return list(replay_check._by_head([ONE], [completion(length) for length in lengths]))


def sizes(found):
    return [[piece.end - piece.start for piece in together] for together in found]


def test_a_long_completion_goes_in_pieces_that_grow_after_the_beginnings_of_all():
    assert sizes(passes(cut(1000, 64, 64))) == [[64, 64, 64], [128], [256], [552]]
    assert sizes(passes(cut(64, 1000))) == [[64, 64], [128], [256], [552]]


def test_a_pass_has_no_more_than_a_few_first_pieces_however_short_they_are():
    assert sizes(passes(cut(*[6] * 8))) == [[6] * 8]
    assert sizes(passes(cut(*[6] * 50))) == [[6] * 42, [6] * 8]
    assert sizes(passes(cut(*[64] * 6))) == [[64] * 4, [64] * 2]
    assert sizes(passes(cut(120, 2, 2, 100, 1))) == [[120, 2], [2, 100], [1]]


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.integers(1, 200)), max_size=30))
def test_every_piece_goes_through_once_in_order_and_under_its_own_head(told):
    pieces = [Piece(head, index, 0, length) for index, (head, length) in enumerate(told)]
    found = list(passes(pieces))
    assert [piece for together in found for piece in together] == pieces
    for together in found:
        assert len({piece.head for piece in together}) == 1
        assert len(together) == 1 or len(together) * max(piece.end for piece in together) <= PASS


def test_a_group_is_found_the_same_together_and_one_by_one(stage, monkeypatch):
    groups = [stage.admit(FORGERS[name](stage, 2)) for name in ("older version", "false reward", "own luck")]
    groups.append(stage.admit(stage.group(3, stage.draws(3))))
    together = [stage.find(group) for group in groups]
    monkeypatch.setattr(replay_check, "passes", lambda pieces: ([piece] for piece in pieces))
    for here, there in zip(together, [stage.find(group) for group in groups], strict=True):
        assert here.breach == there.breach or here.breach.reason == there.breach.reason
        assert here.evidence.tokens == there.evidence.tokens
        assert here.evidence.d_sum == pytest.approx(there.evidence.d_sum, abs=1e-5)
        assert here.evidence.gap_sum == pytest.approx(there.evidence.gap_sum, abs=1e-4)


def test_a_group_of_short_completions_takes_one_pass(stage, monkeypatch):
    group = stage.admit(stage.group(4, stage.draws(4)))
    engine, asked = stage.at(stage.head.id), []
    score_many = engine._decoder.score_many
    monkeypatch.setattr(
        engine._decoder, "score_many", lambda rows, keep: asked.append(len(rows)) or score_many(rows, keep)
    )
    assert stage.find(group).breach is None
    assert asked == [8]


@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f32"])
def test_claims_of_any_lengths_are_scored_together_as_they_are_alone(engine_class, tmp_path):
    pytest.importorskip("llama_cpp")
    folder = models.folder(tmp_path, "Llama" if engine_class.startswith("llama") else "Qwen3")
    engine = make_engine(EngineSpec(engine_class, folder, "cpu", 4, 1))
    engine.load(HEAD, models.weights(folder))
    luck = np.random.default_rng(0)
    claims = [
        Claim(luck.integers(0, 32, prompt), luck.integers(0, 32, length))
        for prompt, length in ((1, 1), (20, 3), (2, 40), (7, 7), (40, 1))
    ]
    for claim, many in zip(claims, engine.score_many(claims, LIMITS), strict=True):
        alone = engine.score(claim.prompt, claim.ids, LIMITS)
        for name in ("logprobs", "low", "high", "squares_low", "squares_high", "squares"):
            one, other = getattr(alone, name), getattr(many, name)
            assert one.shape == other.shape == claim.ids.shape
            assert np.abs(one - other).max() < 1e-5, name
    assert engine.score_many([], LIMITS) == []
    engine.close()
