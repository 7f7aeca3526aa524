"""Draws on a device, run on the CPU: the tokens of the numpy draw, with a bound on its rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from echo_node.engine import token_sampling
from echo_node.engine.base import generate_groups
from echo_node.engine.device_draws import DeviceLogits, cumulative_sum
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import EngineError
from tests.engine import models


def drawn(vocabulary, *, seed=0, rows=7, count=500, temperature=0.8, spread=3.0):
    draws = np.random.default_rng(seed)
    logits = (draws.standard_normal((rows, vocabulary)) * spread).astype(np.float32)
    return logits, draws.integers(0, rows, count), draws.random(count), temperature


@pytest.mark.parametrize("vocabulary", [1, 2, 40, 1000, 50_257])
def test_a_draw_in_float64_is_that_of_numpy(vocabulary):
    logits, of, u, temperature = drawn(vocabulary)
    ids, logprobs = DeviceLogits(torch.from_numpy(logits)).draw(of, u, temperature)
    wanted, expected = token_sampling.draw(logits, of, u, temperature)
    assert (ids == wanted).all()
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 2, 40, 1000, 50_257])
def test_a_draw_in_two_float32_is_within_the_rounding_of_single_probabilities(vocabulary):
    logits, of, u, temperature = drawn(vocabulary)
    ids, logprobs = DeviceLogits(torch.from_numpy(logits), float64=False).draw(of, u, temperature)
    wanted, expected = token_sampling.draw(logits, of, u, temperature)
    assert (ids != wanted).sum() <= 1 + len(ids) // 250
    scores = token_sampling.measure(logits[of], ids, temperature)
    assert (np.maximum(scores.low - u, 0) < 2e-6).all()
    assert (np.maximum(u - scores.high, 0) < 2e-6).all()
    same = ids == wanted
    np.testing.assert_allclose(logprobs[same], expected[same], rtol=0, atol=3e-6)


@pytest.mark.parametrize("count", [1, 5, 4096, 152_000])
def test_a_cumulative_sum_in_two_float32_adds_up_no_error(count):
    values = np.random.default_rng(count).exponential(size=(2, count)).astype(np.float32) ** 4
    high, low = cumulative_sum(torch.from_numpy(values))
    found = high.double().numpy() + low.double().numpy()
    for place in {0, count // 3, count - 1}:
        for row in range(2):
            exact = math.fsum(values[row, : place + 1].tolist())
            assert abs(found[row, place] - exact) <= 2.0**-44 * exact
    plain = np.cumsum(values, axis=1)[:, -1]
    if count > 100_000:
        assert (abs(plain - found[:, -1]) > 2.0**-30 * found[:, -1]).any()


@pytest.mark.parametrize("float64", [True, False])
def test_the_edges_of_u_draw_the_first_and_the_last_token_that_can_be(float64):
    logits = torch.tensor([[0.0, 1.0, -200.0]])
    ids, _ = DeviceLogits(logits, float64=float64).draw(
        np.zeros(2, np.int64), np.array([0.0, 1 - 2**-53]), 1.0
    )
    assert ids[0] == 0
    assert ids[1] in {1, 2}


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(EngineError, match="not finite"):
        DeviceLogits(torch.tensor([[1.0, torch.nan]])).draw(np.zeros(1, np.int64), np.array([0.5]), 1.0)


def test_an_engine_that_draws_on_its_device_draws_the_same_tokens(tmp_path):
    folder = models.folder(tmp_path / "model")
    found = []
    for on_device in (False, True):
        decoder = TorchDecoder(folder, device="cpu", threads=1)
        decoder.draws_on_device = on_device
        engine = LocalEngine(decoder, rows=4)
        engine.load(models.HEAD, models.weights(folder))
        found.append(generate_groups(engine, models.requests(5, lengths=(3, 8))))
    for host, device in zip(*found, strict=True):
        for one, other in zip(host, device, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-12)
