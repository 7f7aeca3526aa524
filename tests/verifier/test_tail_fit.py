"""Bounds fitted to a minute's tokens: none of millions of honest tokens is beyond."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from echo_node.runs.run import ENGINES
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.tail_fit import (
    FEW_MARGIN,
    TOKEN_RATE,
    Tail,
    TokenFigures,
    fit_tolerance,
    mean_bound,
    tail_bound,
)
from echo_node.verifier.tolerance import WIDE, Tolerance

F16 = next(each for each in ENGINES if each.engine == "llama/f16")
F32 = next(each for each in ENGINES if each.engine == "llama/f32")


def distances(draws, size, *, rate=0.14, threshold=2.5e-4, shape=0.15):
    """Distances as SmolLM2 has them in llama/f16: a seventh differ, with a Pareto tail."""
    values = threshold * (draws.random(size) ** -shape - 1) / shape
    return np.where(draws.random(size) < rate, values, 0.0)


def honest(draws, completions=48, tokens=128, scale=1.0):
    def completion():
        d = scale * distances(draws, tokens)
        return TokenFigures(
            d, 8 * d, scale * draws.normal(0, 4e-3, tokens), d < 0, draws.random(tokens) < 0.3
        )

    return [completion() for _ in range(completions)]


def test_a_tail_is_followed_to_where_millions_of_tokens_end():
    draws = np.random.default_rng(1)
    many = distances(draws, 2_000_000)
    for _ in range(10):
        few = distances(draws, 6_000)
        bound = tail_bound(few, TOKEN_RATE)
        assert few.max() < bound
        assert many.max() < bound < 8 * many.max()


def test_a_bound_is_never_below_the_largest_value_and_few_values_get_a_margin():
    values = np.zeros(10_000)
    assert tail_bound(values, TOKEN_RATE) == 0.0
    values[:3] = 1e-4, 2e-4, 3e-4
    assert tail_bound(values, TOKEN_RATE) == pytest.approx(FEW_MARGIN * 3e-4)
    values[:40] = np.linspace(1e-4, 2e-4, 40)
    values[0] = 0.5
    assert tail_bound(values, TOKEN_RATE) >= 0.5
    assert tail_bound(values, 1.0) == 0.5


def test_a_tail_of_equal_values_has_no_width():
    tail = Tail.of(np.full(50, 1e-3))
    assert tail.exceeded_by(1e-6) == pytest.approx(1e-3)


@pytest.mark.parametrize("tokens", [64, 320, 512])
def test_honest_means_of_any_length_keep_to_the_fitted_bounds(tokens):
    draws = np.random.default_rng(2)
    bands = Tolerance(fit_tolerance(F16, honest(draws)))
    for completion in honest(draws, completions=4_000, tokens=tokens):
        assert bands.breach(completion.evidence()) is None


def test_texts_that_differ_more_widen_the_mean():
    draws = np.random.default_rng(3)
    alike = [distances(draws, 256) for _ in range(24)]
    bursts = [distances(draws, 256, rate=0.5 if n % 6 == 0 else 0.07) for n in range(24)]
    assert mean_bound(bursts, 0.02) > 1.3 * mean_bound(alike, 0.02)


def test_a_quiet_model_keeps_the_floor_of_its_class():
    draws = np.random.default_rng(4)
    assert fit_tolerance(F16, honest(draws, scale=0.05)) == F16
    still = [
        TokenFigures(np.zeros(64), np.zeros(64), np.full(64, 1e-6), np.zeros(64, bool), np.zeros(64, bool))
    ]
    assert fit_tolerance(F32, still) == F32


def test_a_model_that_rounds_more_gets_wider_bounds_and_a_bounded_share_beyond_a_width():
    draws = np.random.default_rng(5)
    wider = fit_tolerance(F16, honest(draws, scale=1.5))
    assert F16.d_mean < wider.d_mean < WIDE
    assert F16.d_most < wider.d_most < 4 * F16.d_most
    assert wider.share == 1.0
    wide = fit_tolerance(F16, honest(draws, scale=20))
    assert wide.d_mean > WIDE
    assert wide.share < 1.0


def test_own_luck_is_refused_by_the_fitted_bounds_in_its_first_completion():
    draws = np.random.default_rng(6)
    bands = Tolerance(fit_tolerance(F16, honest(draws)))
    forged = draws.random(64) * 0.5  # uniforms that the tokens were not drawn with
    assert bands.breach(Evidence(64, d_sum=float(forged.sum()), d_most=float(forged.max()))) is not None
    hidden = Evidence(64, d_sum=64 * 3 * F16.d_mean, d_most=0.01)
    assert bands.breach(hidden) is not None


def test_figures_sum_up_as_a_verifier_sums_them():
    figures = dataclasses.replace(honest(np.random.default_rng(7), completions=1, tokens=10)[0])
    found = figures.evidence()
    assert found.tokens == 10
    assert found.d_sum == pytest.approx(figures.d.sum())
    assert found.gap_most == pytest.approx(np.abs(figures.gaps).max())
    assert found.rare.tokens == figures.is_rare.sum()
