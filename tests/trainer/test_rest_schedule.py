"""How long a sampler that fails is left alone, and what is forgiven."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer.rest_schedule import FORGIVEN_AFTER, LONGEST_REST, SAMPLERS, RestSchedule

ANN, BOB = b"ann", b"bob"


def play(rests, answers, steps=1024):
    """Ask Ann whenever it does not rest; return at which steps it failed."""
    failed = []
    for step in range(steps):
        rests.begin_step()
        if rests.is_resting(ANN):
            continue
        if next(answers, False):
            rests.end_step([ANN], [])
        else:
            failed.append(step)
            rests.end_step([], [ANN])
    return failed


def test_a_first_failure_costs_nothing_and_each_further_one_twice_as_long():
    failed = play(RestSchedule(), iter(()))
    pauses = [after - before for before, after in pairwise(failed)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert set(pauses[7:]) == {LONGEST_REST}


def test_who_fails_once_and_then_answers_is_forgiven():
    rests = RestSchedule()
    rests.end_step([], [ANN])
    for _ in range(FORGIVEN_AFTER):
        rests.end_step([ANN, BOB], [])
    rests.end_step([], [ANN])
    rests.begin_step()
    assert not rests.is_resting(ANN), "as after a first failure"


@given(st.integers(1, FORGIVEN_AFTER - 1))
def test_answers_between_failures_buy_less_than_they_cost(between):
    """However many answers come between two failures, short of forgiveness, rests grow."""
    answers = (number % (between + 1) < between for number in range(10**6))
    assert len(play(RestSchedule(), answers)) <= 7 + 1024 // LONGEST_REST


@given(st.lists(st.booleans(), max_size=2048))
def test_whatever_a_sampler_does_it_fails_in_few_of_the_steps(answers):
    """At most a failure for each forgiven one, and those of the growing rests."""
    failed = play(RestSchedule(), iter(answers + [True] * 4096))
    assert len(failed) <= 1 + 7 + 1024 // FORGIVEN_AFTER


def test_strangers_do_not_fill_the_memory():
    rests = RestSchedule()
    for number in range(SAMPLERS + 10):
        rests.end_step([], [number.to_bytes(32)])
    assert len(rests._records) == SAMPLERS
