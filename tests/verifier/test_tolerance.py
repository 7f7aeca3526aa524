"""Tolerances, cumulative evidence, skipped slots and the selection of groups."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from echo_node.contract import Prompt
from echo_node.runs.run import ENGINES
from echo_node.runtime.reputation import HALF_LIFE, LEAST_RATE, MUTE_SECONDS, NEWCOMER, Trust
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.selection import WAITING, Selection
from echo_node.verifier.skipped_slots import AUDITED, ENOUGH, SkippedSlots
from echo_node.verifier.tolerance import CONTRAST, GAP, GAP_FLOOR, WIDE, CumulativeEvidence, Tolerance
from protocol import TrajectoryGroup, open_sealed, seal
from protocol.verdict import check_draw, drawn
from tests.crafting import SAMPLERS, Chain, completion, group, identity, open_run
from tests.records import record_of

F16 = next(each for each in ENGINES if each.engine == "llama/f16")
PEER, HEAD = b"p" * 32, b"h" * 32


def of(tokens, d_mean=0.0, **more):
    return Evidence(tokens=tokens, d_sum=tokens * d_mean, **more)


def test_evidence_adds_up():
    whole = of(10, 0.1, d_most=0.5, z_most=1.0, gap_sum=2.0) + of(
        30, 0.2, d_most=0.3, z_most=4.0, gap_sum=2.0
    )
    assert (whole.tokens, whole.d_most, whole.z_most) == (40, 0.5, 4.0)
    assert whole.d_mean == pytest.approx(0.175)
    assert whole.gap_mean == pytest.approx(0.1)
    assert Evidence().d_mean == Evidence().gap_mean == Evidence().contrast == 0.0


def test_the_band_is_the_manifests_for_64_tokens_and_narrows_with_more():
    bands = Tolerance(F16)
    assert bands.scale(64) == pytest.approx(1.0)
    assert bands.scale(6) > 2
    assert bands.scale(10**9) == pytest.approx(0.4, abs=1e-3)
    just_below, just_above = 0.99 * F16.d_mean, 1.01 * F16.d_mean
    assert bands.breach(of(64, just_below)) is None
    assert bands.breach(of(64, just_above)).reason == "luck-not-its-own"
    assert bands.breach(of(6, just_above)) is None
    assert bands.breach(of(6400, 0.5 * F16.d_mean)).reason == "luck-not-its-own"


def test_one_token_within_its_reach_is_honest_however_few_there_are_beside_it():
    bands = Tolerance(F16)
    far, far_scaled = 0.99 * F16.d_most, 0.99 * F16.z_most
    for tokens in range(1, 64):
        alone = Evidence(tokens, d_sum=far, d_most=far, z_sum=far_scaled, z_most=far_scaled)
        assert bands.breach(alone) is None
        if tokens > 1:
            two = Evidence(tokens, d_sum=2 * far, d_most=far)
            assert bands.breach(two).reason == "luck-not-its-own"
            two = Evidence(
                tokens,
                z_sum=max(2 * far_scaled, 1.01 * tokens * bands.scale(tokens) * F16.z_mean),
                z_most=far_scaled,
            )
            assert bands.breach(two).reason == "luck-not-its-own"


def test_each_figure_has_its_own_reason():
    bands = Tolerance(F16)
    assert bands.breach(of(64, d_most=2 * F16.d_most)).reason == "token-out-of-reach"
    assert bands.breach(of(64, z_most=2 * F16.z_most)).reason == "token-out-of-reach"
    assert bands.breach(Evidence(tokens=64, z_sum=65 * F16.z_mean)).reason == "luck-not-its-own"
    assert bands.breach(of(64, gap_sum=64 * 0.1)).reason == "wrong-logprobs"
    wide = Tolerance(dataclasses.replace(F16, d_mean=0.01, d_most=1.0))
    assert wide.wide
    assert not bands.wide
    assert wide.breach(of(64, contrast_sum=64 * 0.006)).reason == "wrong-temperature"
    assert wide.breach(of(64, contrast_sum=64 * 0.004)) is None
    assert bands.breach(Evidence()) is None


EXACT = dataclasses.replace(F16, d_mean=2**-12, d_most=2**-7, z_mean=2**-9, z_most=2**-4)
"""Bounds that floats hold exactly, so that a test can stand right on them and one step beyond."""


def at_bound_then_beyond(tolerance, tokens, **figures):
    """Whether evidence of exactly these means is honest; and the breach one float further."""
    sums = {name: value * tokens if name.endswith("_sum") else value for name, value in figures.items()}
    beyond = {name: math.nextafter(value, math.inf) for name, value in sums.items()}
    bands = Tolerance(tolerance)
    honest = bands.breach(Evidence(tokens, **sums)) is None
    return honest, getattr(bands.breach(Evidence(tokens, **beyond)), "reason", None)


@pytest.mark.parametrize(("tokens", "width"), [(16, 1.6), (64, 1.0), (256, 0.7), (6400, 0.46)])
def test_the_width_of_the_bound_is_a_floor_and_a_scatter_of_one_over_the_root(tokens, width):
    assert Tolerance.scale(tokens) == pytest.approx(width, rel=1e-12)


def test_a_single_token_right_at_its_bound_is_honest():
    assert at_bound_then_beyond(EXACT, 64, d_most=EXACT.d_most) == (True, "token-out-of-reach")
    assert at_bound_then_beyond(EXACT, 64, z_most=EXACT.z_most) == (True, "token-out-of-reach")


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_a_mean_right_at_its_bound_is_honest(tokens):
    scale = Tolerance.scale(tokens)
    assert at_bound_then_beyond(EXACT, tokens, d_sum=scale * EXACT.d_mean) == (True, "luck-not-its-own")
    assert at_bound_then_beyond(EXACT, tokens, z_sum=scale * EXACT.z_mean) == (True, "luck-not-its-own")


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_few_tokens_right_at_the_bound_of_a_single_one_are_honest(tokens):
    single = dataclasses.replace(EXACT, d_most=2**-4, z_most=2**-2)
    honest = at_bound_then_beyond(single, tokens, d_sum=single.d_most / tokens)
    assert honest == (True, "luck-not-its-own")
    honest = at_bound_then_beyond(single, tokens, z_sum=single.z_most / tokens)
    assert honest == (True, "luck-not-its-own")


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_mean_log_probability_gap_right_at_its_bound_is_honest(tokens):
    scale = Tolerance.scale(tokens)
    usual = at_bound_then_beyond(EXACT, tokens, gap_sum=GAP * EXACT.d_mean * scale)
    assert usual == (True, "wrong-logprobs")
    narrow = dataclasses.replace(EXACT, d_mean=GAP_FLOOR / GAP / 2)
    floor = at_bound_then_beyond(narrow, tokens, gap_sum=GAP_FLOOR * scale)
    assert floor == (True, "wrong-logprobs")


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_temperature_contrast_right_at_its_bound_is_honest(tokens):
    wide = dataclasses.replace(EXACT, d_mean=2**-6, d_most=1.0)
    bound = CONTRAST * Tolerance.scale(tokens) * wide.d_mean
    assert at_bound_then_beyond(wide, tokens, contrast_sum=bound) == (True, "wrong-temperature")
    assert not Tolerance(dataclasses.replace(EXACT, d_mean=WIDE)).wide
    assert Tolerance(dataclasses.replace(EXACT, d_mean=math.nextafter(WIDE, 1))).wide


def test_what_one_group_hides_a_hundred_show_and_a_new_start_is_a_new_start():
    cumulative, bands = CumulativeEvidence(), Tolerance(F16)
    small = of(64, 0.7 * F16.d_mean)
    found = [cumulative.add(PEER, "llama/f16", small, bands) for _ in range(100)]
    assert found[0] is None
    first = next(place for place, breach in enumerate(found) if breach)
    assert 1 < first < 20
    assert "over" in found[first].what
    cumulative.forget(PEER)
    assert cumulative.add(PEER, "llama/f16", small, bands) is None
    honest = CumulativeEvidence()
    luck = np.random.default_rng(0)
    for _ in range(400):
        assert honest.add(PEER, "llama/f16", of(64, luck.exponential(0.1) * F16.d_mean), bands) is None


def test_few_holes_are_bad_luck_and_many_worse_ones_are_not():
    skipped = SkippedSlots()
    for slot in range(40):
        if slot % 15:
            skipped.record(HEAD, PEER, slot, float(slot % 2))
    assert skipped.suspicious(HEAD, PEER) == []
    picky = SkippedSlots()
    luck = np.random.default_rng(0)
    worth = luck.random(60)
    for slot, value in enumerate(worth):
        if value > 0.5:
            picky.record(HEAD, PEER, slot, value)
    audited = picky.suspicious(HEAD, PEER)
    assert len(audited) == AUDITED
    assert all(worth[slot] <= 0.5 for slot in audited)
    assert "left out" in picky.worth_less(HEAD, PEER, [worth[slot] for slot in audited])
    unlucky = SkippedSlots()
    kept = [slot for slot in range(60) if luck.random() > 0.4]
    for slot in kept:
        unlucky.record(HEAD, PEER, slot, worth[slot])
    audited = unlucky.suspicious(HEAD, PEER)
    assert audited
    assert unlucky.worth_less(HEAD, PEER, [worth[slot] for slot in audited]) is None
    assert SkippedSlots().suspicious(HEAD, PEER) == []
    assert ENOUGH <= 40


def test_trust_is_earned_slowly_lost_at_once_and_fades():
    trust = Trust()
    assert trust.rate(PEER, 0) == 1.0
    for _ in range(NEWCOMER - 1):
        trust.honest(PEER, 0)
    assert trust.rate(PEER, 0) == 1.0
    for _ in range(500):
        trust.honest(PEER, 0)
    assert trust.rate(PEER, 0) == LEAST_RATE
    level = trust.level(PEER, 0)
    assert level > 0.9
    assert trust.level(PEER, HALF_LIFE * 6) < level
    trust.condemned(PEER, "luck-not-its-own", 0)
    assert trust.level(PEER, 0) == 0
    assert trust.is_muted(PEER, MUTE_SECONDS - 1)
    assert "luck-not-its-own" in trust.describe(PEER, 1)
    assert not trust.is_muted(PEER, MUTE_SECONDS + 1)
    assert "newcomer again" in trust.describe(PEER, MUTE_SECONDS + 1)
    trust.condemned(PEER, "wrong-reward", MUTE_SECONDS + 1)
    assert trust.is_muted(PEER, 3 * MUTE_SECONDS), "the second time counts twice as much"


def admitted(run, head, sampler, slot, rewards):
    made = group(run, head.id, sampler, slot, [completion([1, 12], reward=reward) for reward in rewards])
    opened = open_sealed(seal(made, sampler, run.id), TrajectoryGroup, run.id)
    return record_of(opened, 0, Prompt(""))


def test_lots_are_this_verifiers_and_fall_at_the_rate_of_the_peer():
    run, verifier = open_run(), identity("verifier")
    head, trust = Chain(run).next(*SAMPLERS), Trust()
    selection = Selection(run.id, verifier, trust)
    known, new = SAMPLERS[:2]
    for _ in range(1000):
        trust.honest(known.public, 0)
    for slot in range(300):
        selection.offer(admitted(run, head, known, slot, (0.0, 1.0)), 0)
    assert 12 < len(selection) < 55
    one, lot = selection.next()
    check_draw(verifier.public, run.id, one.id, lot)
    assert drawn(lot, LEAST_RATE)
    for slot in range(20):
        assert selection.offer(admitted(run, head, new, slot, (0.0, 1.0)), 0), "all of a newcomer's"
        equal = admitted(run, head, new, slot + 50, (1.0, 1.0))
        assert selection.offer(equal, 0), "what it claims of its rewards spares it nothing"
    turns = [selection.next()[0].sampler for _ in range(20)]
    assert 1 <= turns.count(new.public) <= 3, "newcomers get a tenth while others wait"
    trust.condemned(new.public, "x", 0)
    assert not selection.offer(admitted(run, head, new, 99, (0.0, 1.0)), 1)
    for slot in range(2 * WAITING):
        selection.offer(admitted(run, head, SAMPLERS[2], slot, (0.0, 1.0)), 0)
    assert selection.passed_over > 0
