"""Narrow breaches of many proven peers of a class are undecided; nobody buys that with new keys."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.runs.run import ENGINES
from echo_node.runtime.reputation import NEWCOMER
from echo_node.verifier.class_breaches import FEWEST, NARROW, SHARE, WINDOW, ClassBreaches
from echo_node.verifier.evidence import Evidence, GapSum
from echo_node.verifier.tolerance import GAP, Tolerance

F16 = next(each for each in ENGINES if each.engine == "llama/f16")
CLASS = "llama/f16"
LITTLE = 1.1


def key(number):
    return bytes([number]) * 32


def with_proven(*numbers, engine=CLASS, now=0.0):
    breaches = ClassBreaches()
    for number in numbers:
        prove(breaches, key(number), engine, now)
    return breaches


def prove(breaches, peer, engine=CLASS, now=0.0):
    for _ in range(NEWCOMER):
        breaches.honest(peer, engine, now)


def test_the_first_narrow_breach_of_a_proven_peer_is_undecided_and_the_second_is_not():
    breaches = with_proven(*range(10))
    assert breaches.excuses(key(0), CLASS, LITTLE, 1.0)
    assert not breaches.excuses(key(0), CLASS, LITTLE, 2.0)
    prove(breaches, key(0), now=3.0)
    assert not breaches.excuses(key(0), CLASS, LITTLE, 4.0), "once a day, however often it is proven again"
    prove(breaches, key(0), now=WINDOW + 5.0)
    assert breaches.excuses(key(0), CLASS, LITTLE, WINDOW + 6.0)


def test_a_plain_breach_is_never_excused_and_costs_the_standing():
    breaches = with_proven(0, 1, 2, 3)
    for number in range(3):
        breaches.excuses(key(number), CLASS, LITTLE, 1.0)
    assert breaches.is_in_doubt(CLASS, 1.0)
    assert not breaches.excuses(key(3), CLASS, 1.01 * NARROW, 1.0)
    assert not breaches.excuses(key(0), CLASS, float("inf"), 1.0)
    assert breaches.count(CLASS, 1.0) == (2, 2)


def test_breaches_that_cluster_put_their_class_in_doubt_and_no_other():
    breaches = with_proven(0, 1, 2, 3)
    for number in range(FEWEST):
        assert not breaches.is_in_doubt(CLASS, 1.0)
        assert breaches.excuses(key(number), CLASS, LITTLE, 1.0)
    assert breaches.is_in_doubt(CLASS, 1.0)
    assert breaches.excuses(key(0), CLASS, LITTLE, 2.0), "again"
    assert breaches.excuses(key(200), CLASS, LITTLE, 2.0), "of a newcomer too"
    assert not breaches.excuses(key(200), "torch/f32", LITTLE, 2.0)
    assert not breaches.is_in_doubt(CLASS, WINDOW + 2.0), "for a day"


def test_throwaway_keys_buy_nothing():
    breaches = with_proven(0)
    for number in range(1, 200):
        assert not breaches.excuses(key(number), CLASS, LITTLE, 1.0)
    for _ in range(NEWCOMER - 1):
        breaches.honest(key(201), CLASS, 1.0)
    assert not breaches.excuses(key(201), CLASS, LITTLE, 1.0), "one short of proven"
    assert not breaches.is_in_doubt(CLASS, 1.0)


def test_a_small_part_of_a_large_class_does_not_put_it_in_doubt():
    many = round(FEWEST / SHARE)
    breaches = with_proven(*range(many + 1))
    for number in range(FEWEST):
        assert breaches.excuses(key(number), CLASS, LITTLE, 1.0), "as the first of each"
    assert not breaches.is_in_doubt(CLASS, 1.0)
    assert not breaches.excuses(key(0), CLASS, LITTLE, 2.0)
    breaches.excuses(key(FEWEST), CLASS, LITTLE, 2.0)
    assert breaches.is_in_doubt(CLASS, 2.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([LITTLE, 2.0]), st.floats(0, 2 * WINDOW)),
        max_size=200,
    )
)
def test_a_peer_that_was_never_proven_is_excused_only_in_a_class_in_doubt(events):
    breaches, honest = ClassBreaches(), dict.fromkeys(range(6), 0)
    for number, is_honest, over, now in sorted(events, key=lambda each: each[3]):
        if is_honest:
            breaches.honest(key(number), CLASS, now)
            honest[number] += 1
        elif breaches.excuses(key(number), CLASS, over, now):
            assert over <= NARROW
            assert honest[number] >= NEWCOMER or breaches.is_in_doubt(CLASS, now)
    assert breaches.count(CLASS, 0.0)[0] <= sum(count >= NEWCOMER for count in honest.values())


@pytest.mark.parametrize(
    "found",
    [
        Evidence(64, d_most=LITTLE * F16.d_most),
        Evidence(64, z_most=LITTLE * F16.z_most),
        Evidence(64, d_sum=64 * LITTLE * F16.d_mean),
        Evidence(64, z_sum=64 * LITTLE * F16.z_mean),
        Evidence(64, gap_sum=64 * LITTLE * GAP * F16.d_mean),
        Evidence(64, gap_most=LITTLE * F16.gap_most),
        Evidence(64, ends=GapSum(1, -LITTLE * F16.gap_most, LITTLE * F16.gap_most)),
    ],
)
def test_a_breach_says_by_how_much_and_the_worst_figure_counts(found):
    bands = Tolerance(F16)
    assert bands.breach(found).over == pytest.approx(LITTLE)
    hidden = dataclasses.replace(found, z_sum=64 * 5 * F16.z_mean)
    assert bands.breach(hidden).over == pytest.approx(5)
