"""The draws of many rows are those of the wire's own rules, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from echo_node.engine.token_sampling import draw, measure
from echo_node.errors import EngineError
from protocol import sampling


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (40, 16), (9, 257), (30, 50_000), (2, 300_000)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_and_measures_are_those_of_the_wire(rows, vocabulary, temperature):
    luck = np.random.default_rng(vocabulary)
    logits = luck.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    shared = luck.integers(0, rows, 3 * rows)
    u = luck.random(3 * rows)
    u[0], u[-1] = 0.0, 1 - 2.0**-53
    probability = sampling.probabilities(logits, temperature)[shared]

    tokens, logprobs = draw(logits, shared, u, temperature)
    assert np.array_equal(tokens, sampling.draw(probability, u))
    assert np.allclose(logprobs, np.log(probability[np.arange(u.size), tokens]), rtol=0, atol=1e-12)

    claimed = np.minimum(tokens + luck.integers(0, 3, u.size), vocabulary - 1)
    scores = measure(logits[shared], claimed, temperature)
    wanted, found = sampling.replay(probability, claimed, u), scores.replay(u)
    assert np.array_equal(wanted.d, found.d)
    assert np.array_equal(wanted.z, found.z)
    assert measure(logits[shared], tokens, temperature).replay(u).d.max() < 1e-12


@pytest.mark.parametrize("vocabulary", [16, 512])
def test_luck_on_an_edge_draws_the_id_above_it_and_never_an_impossible_one(vocabulary):
    even = np.zeros((1, vocabulary), np.float32)
    edges = np.arange(vocabulary) / vocabulary
    assert np.array_equal(draw(even, np.zeros(vocabulary, np.int64), edges, 1.0)[0], np.arange(vocabulary))
    sure = np.full((1, vocabulary), -2000, np.float32)
    sure[0, 5] = 0
    luck = np.array([0.0, 0.5, 1 - 2.0**-53])
    assert draw(sure, np.zeros(3, np.int64), luck, 1.0)[0].tolist() == [5, 5, 5]


def test_the_log_probability_of_the_impossible_is_finite():
    logits = np.array([[0.0, -2000.0]], dtype=np.float32)
    scores = measure(logits, np.array([1]), 1.0)
    assert scores.logprobs[0] == -2000.0
    assert scores.low[0] == scores.high[0] == 1.0


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_name_the_engine(broken):
    logits = np.array([[0.0, broken, 1.0]], dtype=np.float32)
    with pytest.raises(EngineError, match="not finite"):
        draw(logits, np.zeros(1, np.int64), np.array([0.5]), 1.0)
    with pytest.raises(EngineError, match="not finite"):
        measure(logits, np.zeros(1, np.int64), 1.0)
