"""Lies on single log-probabilities: a cap per token, and means of end and of rare tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks import verify_caps
from benchmarks.forgers_stage import Stage
from echo_node.engine.base import Scores
from echo_node.models import embedded
from echo_node.runs.run import ENGINES
from echo_node.verifier.evidence import RARE, Evidence, GapSum, evidence
from echo_node.verifier.tolerance import (
    FEW_FLOOR,
    SIGNED_FLOOR,
    CumulativeEvidence,
    Tolerance,
    few_gap_share,
)
from tests import smollm2

F16 = next(each for each in ENGINES if each.engine == "llama/f16")
BANDS = Tolerance(F16)
PEER = b"p" * 32
LONG = 256
"""Tokens of a completion in which a lie on one hardly moves the mean of all."""


def scored(rng, tokens=LONG):
    """A completion whose every token is where its uniform number drew it."""
    high = rng.uniform(0.05, 1.0, tokens)
    low = high * rng.uniform(0.0, 0.95, tokens)
    luck = rng.uniform(low, high)
    squares = np.full(tokens, 0.5)
    return Scores(np.log(high - low), low, high, squares / 4, squares / 2, squares), luck


def found(claim, rng, tokens=LONG):
    """The evidence of a completion that ends, with the log-probabilities that `claim` returns."""
    scores, luck = scored(rng, tokens)
    is_end = np.arange(tokens) == tokens - 1
    return evidence(scores, luck, claim(scores.logprobs, is_end), is_end)


def honest(rng):
    """Log-probabilities as of another engine: off by a thousandth, twice that where rare."""

    def claim(true, _is_end):
        return true + rng.normal(0.0, np.where(true < RARE, 3e-3, 1e-3))

    return claim


def test_a_lie_on_the_end_token_alone_is_found_though_the_mean_of_all_is_not_moved():
    rng = np.random.default_rng(1)
    lied = found(lambda true, is_end: true - 1.5 * is_end, rng)
    without_caps = Tolerance(dataclasses.replace(F16, gap_most=1e3))
    assert without_caps.breach(lied) is None
    assert BANDS.breach(lied).reason == "wrong-logprobs"
    assert "a log-probability is off by 1.5;" in BANDS.breach(lied).what


def test_a_gap_right_at_the_cap_is_honest():
    assert BANDS.breach(Evidence(tokens=LONG, gap_sum=F16.gap_most, gap_most=F16.gap_most)) is None
    beyond = math.nextafter(F16.gap_most, math.inf)
    assert BANDS.breach(Evidence(tokens=LONG, gap_sum=beyond, gap_most=beyond)).reason == "wrong-logprobs"


@pytest.mark.parametrize("which", ["ends", "rare"])
def test_a_mean_of_few_gaps_right_at_its_bound_is_honest(which):
    at = GapSum(1, F16.gap_most, F16.gap_most)
    assert few_gap_share(at) == F16.gap_most, "one token may be off by the cap"
    assert BANDS.breach(Evidence(tokens=LONG, **{which: at})) is None
    beyond = math.nextafter(F16.gap_most, math.inf)
    found = BANDS.breach(Evidence(tokens=LONG, **{which: GapSum(1, beyond, beyond)}))
    assert found.reason == "wrong-logprobs"


def test_the_bound_of_a_mean_falls_with_the_number_of_tokens_to_its_floor():
    for signed, floor in ((0.0, FEW_FLOOR), (1.0, SIGNED_FLOOR)):
        shares = [few_gap_share(GapSum(n, signed * n, n)) for n in (1, 4, 10**12)]
        assert shares == pytest.approx([1.0, 1 / (floor + (1 - floor) / 2), 1 / floor], rel=1e-4)


@pytest.mark.parametrize("push", [-0.1, 0.1])
@pytest.mark.parametrize("which", ["end", "rare"])
def test_small_lies_of_one_sign_on_few_tokens_add_up_against_a_peer(which, push):
    rng, cumulative = np.random.default_rng(2), CumulativeEvidence()
    usual = honest(rng)

    def lie(true, is_end):
        return usual(true, is_end) + push * (is_end if which == "end" else true < RARE)

    breach = None
    for _ in range(64):
        one = found(lie, rng)
        assert one.gap_most < F16.gap_most  # no single token gives it away
        breach = breach or cumulative.add(PEER, F16.engine, one, BANDS)
    assert breach is not None
    assert breach.reason == "wrong-logprobs"


def test_lies_that_change_their_sign_with_the_reward_are_found_too():
    """Pushed up where it pays and down where it does not, they cancel in the signed mean."""
    rng, cumulative = np.random.default_rng(3), CumulativeEvidence()
    breaches = [
        cumulative.add(
            PEER, F16.engine, found(lambda true, is_end, sign=sign: true + sign * 0.1 * is_end, rng), BANDS
        )
        for sign in (-1, 1) * 64
    ]
    assert any(breaches)


def test_no_honest_peer_of_a_thousand_is_held_to_it():
    """Each with 256 groups of long completions, as an engine that rounds otherwise gives them.

    Of normal gaps with a spread a tenth of the cap none breaks a bound of ten spreads over the root
    of their number; the chance is below 1e-20 per sum.
    """
    rng = np.random.default_rng(4)
    for _ in range(1_000):
        gaps = rng.normal(0.0, F16.gap_most / 10, 256)
        sums = np.cumsum(gaps), np.cumsum(np.abs(gaps))
        for tokens in (1, 2, 3, 8, 64, 256):
            share = few_gap_share(GapSum(tokens, float(sums[0][tokens - 1]), float(sums[1][tokens - 1])))
            assert share <= F16.gap_most * (1 if tokens < 64 else 1.2)


def test_without_end_or_rare_tokens_nothing_is_tested():
    assert few_gap_share(GapSum()) == 0.0
    assert Evidence().gap_most == 0.0


def test_sums_of_gaps_add_up():
    rng = np.random.default_rng(5)
    parts = [found(honest(rng), rng) for _ in range(3)]
    whole = sum(parts, Evidence())
    assert whole.ends.tokens == 3
    assert whole.rare.tokens == sum(each.rare.tokens for each in parts) > 0
    assert whole.rare.absolute == pytest.approx(sum(each.rare.absolute for each in parts))
    assert whole.rare.signed == pytest.approx(sum(each.rare.signed for each in parts))
    assert whole.gap_most == max(each.gap_most for each in parts)


def test_real_groups_with_a_lie_on_their_end_tokens_pass_alone_and_not_together():
    """Honest draws of the embedded model, one end in eight claimed less likely than it was."""
    stage = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1)
    cumulative = CumulativeEvidence()
    try:
        breach = None
        for slot in range(120):
            draws = stage.draws(slot)
            longest = [row for row, draw in enumerate(draws) if draw.finish == "end" and draw.ids.size == 6]
            if not longest:
                continue  # in a shorter completion even this lie moves the mean
            ended = longest[0]
            lied = draws[ended].logprobs.copy()
            lied[-1] -= 0.12
            draws = [
                dataclasses.replace(draw, logprobs=lied) if row == ended else draw
                for row, draw in enumerate(draws)
            ]
            finding = stage.find(stage.admit(stage.group(slot, draws), in_turn=True))
            assert finding.breach is None
            breach = cumulative.add(PEER, F16.engine, finding.evidence, BANDS)
            if breach is not None:
                break
    finally:
        stage.close()
    assert breach is not None
    assert "end tokens" in breach.what


def judged(path, completions, **more):
    """Judge honest completions as `python -m benchmarks.verify_caps` does."""
    settings = {"folder": embedded.folder(), "max_tokens": 6, "threads": 1} | more
    stage = Stage(group_size=verify_caps.GROUP, **settings)
    try:
        return verify_caps.go_on(stage, completions, path)
    finally:
        stage.close()


def test_judging_the_honest_goes_on_where_it_stopped(tmp_path):
    once = judged(tmp_path / "once", 64)
    first = judged(tmp_path / "twice", 32)
    assert first.completions == 32
    assert judged(tmp_path / "twice", 64) == once
    assert (once.refused, once.refused_together, once.reasons) == (0, 0, [])
    assert 0 < once.gap_most < F16.gap_most
    assert once.end_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine_class", [each.engine for each in ENGINES])
def test_of_twenty_thousand_honest_completions_none_is_refused(tmp_path, engine_class):
    found = judged(tmp_path / "state", 20_000, engine_class=engine_class)
    assert (found.completions, found.refused, found.refused_together) == (20_000, 0, 0), found.reasons


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("tokens", "completions"), [(64, 10_000), (512, 500)])
def test_on_smollm2_no_honest_completion_is_refused(tokens, completions):
    """Resumable: the progress of an earlier run is in build/."""
    path = verify_caps.BUILD / f"verify_caps-smollm2-llama-f16-{tokens}.json"
    found = judged(path, completions, folder=smollm2.folder(), max_tokens=tokens)
    assert (found.refused, found.refused_together) == (0, 0), found.reasons
