"""Deadlines of requests: by measured tokens a second, within the limits of the run."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer.request_deadlines import (
    CEILING,
    SAMPLERS,
    SLACK,
    SLOWEST,
    START_SECONDS,
    RequestDeadlines,
    ceiling,
)

ANN, BOB, CAT = (name.encode() for name in ("ann", "bob", "cat"))


def test_a_request_may_take_as_long_as_its_longest_groups_at_the_measured_speed():
    deadlines = RequestDeadlines(8 * 2_048)
    deadlines.record(ANN, 2, 2 * 8 * 500, 400.0)
    assert deadlines.seconds(ANN, 3) == START_SECONDS + SLACK * 3 * 8 * 2_048 / 20
    assert deadlines.seconds(BOB, 1) == START_SECONDS + SLACK * 8 * 2_048 / 20, "a newcomer as the slowest"
    assert deadlines.expected(ANN, 3) == 600.0
    assert deadlines.expected(BOB, 3) is None


@given(st.floats(1e-6, 1e9), st.integers(1, 512), st.integers(1, 10**7))
def test_nobody_gains_time_by_being_slower_than_the_slowest_that_is_waited_for(seconds, groups, tokens):
    deadlines = RequestDeadlines(tokens)
    deadlines.record(ANN, 1, 1, seconds)
    assert deadlines.seconds(ANN, groups) <= START_SECONDS + SLACK * groups * tokens / SLOWEST


def test_one_is_late_by_the_median_of_the_others_once_half_of_them_are_done():
    assert ceiling([]) == math.inf
    assert ceiling([None]) == math.inf
    assert ceiling([10.0]) == CEILING * 10
    assert ceiling([10.0, None]) == CEILING * 10
    assert ceiling([10.0, None, None]) == math.inf, "one fast sampler does not shut out a slow majority"
    assert ceiling([10.0, 40.0, None]) == CEILING * 40


def test_speeds_of_many_keys_take_bounded_room():
    deadlines = RequestDeadlines(64)
    for number in range(SAMPLERS + 10):
        deadlines.record(number.to_bytes(4), 1, 64, 1.0)
    assert len(deadlines._speeds) == SAMPLERS
    assert not deadlines.is_measured((0).to_bytes(4))
