"""Mutated vectors and random bytes, against every decoder of the wire."""

import pytest

from tests.fuzz.decoders import fuzz


@pytest.mark.timeout(400)
@pytest.mark.parametrize("inputs", [20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_many_inputs_bring_out_nothing_but_protocol_errors(inputs):
    outcomes = fuzz(inputs, seed=20_261_116)
    assert sum(outcomes.values()) == inputs
    reached = {
        "accepted",
        "truncated",
        "not-canonical",
        "wrong-type",
        "out-of-range",
        "inconsistent",
        "bad-signature",
        "bad-link",
    }
    assert reached <= set(outcomes), "the inputs get past every gate"
    assert outcomes["accepted"] > inputs / 400


def test_no_input_takes_more_than_a_small_multiple_of_its_size():
    assert sum(fuzz(6_000, seed=7, memory=True).values()) == 6_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_two_million_inputs_over_several_seeds(seed):
    assert sum(fuzz(400_000, seed=seed).values()) == 400_000
