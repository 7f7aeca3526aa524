"""`python -m benchmarks.verify` from end to end on the embedded model, with a few of everything."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import verify
from benchmarks.forgers import FORGERS
from benchmarks.verify_power import NOT_DETECTABLE, Power, Tokens
from echo_node.runs.run import ENGINES
from echo_node.verifier.tolerance import Tolerance


def tokens(count, scale, seed):
    return Tokens(scale * np.random.default_rng(seed).random((3, count)))


def test_tokens_are_counted_by_how_far_apart_honest_and_forged_lie():
    power = Power(tokens(20_000, 1e-4, 0), Tolerance(ENGINES[0]))
    assert power.most == 625
    needed = [power.needed(tokens(4_000, scale, 1)) for scale in (1e-2, 1.5e-4, 1e-4)]
    assert needed[0] == 8
    assert 8 < needed[1] < 512
    assert needed[2] == NOT_DETECTABLE
    assert power.false_alarms(tokens(20_000, 1e-4, 2)) < 0.01
    assert power.condemned(tokens(4_000, 1e-2, 1)) == 8
    assert power.condemned(tokens(4_000, 1e-4, 1)) == NOT_DETECTABLE


@pytest.mark.slow
def test_the_last_line_tells_every_forger_and_what_it_takes(capsys):
    verify.main(["--quick", "--model", "embedded"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["embedded"]["honest_refused"] == 0
    assert found["embedded"]["caught"].keys() == found["embedded"]["tokens_needed"].keys() == FORGERS.keys()
    assert {found["embedded"]["caught"][name] for name in verify.SURE} == {1.0}
    assert found["proof_bytes_per_token"] == 0
    assert found["condemned_within_500"] >= 0.99
