"""How a batch is shared out: all of it, by what was measured, and nobody for ever left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer.work_split import EvenSplit, SpeedSplit, bound_young

ANN, BOB, CAT = (name.encode() for name in ("ann", "bob", "cat"))
SAMPLERS = st.lists(st.binary(min_size=1, max_size=2), min_size=1, max_size=9, unique=True)
SECONDS = st.floats(1e-4, 1e4)


@given(SAMPLERS, st.integers(1, 600), st.lists(SECONDS, min_size=9, max_size=9))
def test_shares_are_always_the_whole_and_nobody_who_could_have_one_has_none(samplers, groups, seconds):
    measured = SpeedSplit()
    for sampler, took in zip(samplers[1:], seconds, strict=False):
        measured.took(sampler, 8, took)
    for spread in (EvenSplit(), SpeedSplit(), measured):
        shares = spread.shares(samplers, groups)
        assert sum(shares) == groups
        assert len(shares) == len(samplers)
        assert min(shares) >= (1 if groups >= len(samplers) else 0)
    assert SpeedSplit().shares(samplers, groups) == EvenSplit().shares(samplers, groups), (
        "equal before anything is known"
    )


@given(st.integers(1, 200), SECONDS, SECONDS)
def test_who_is_faster_has_no_less(groups, one, other):
    spread = SpeedSplit()
    spread.took(ANN, 10, min(one, other))
    spread.took(BOB, 10, max(one, other))
    fast, slow = spread.shares([ANN, BOB], groups)
    assert fast >= slow


def test_three_times_as_fast_is_about_three_times_as_much():
    spread = SpeedSplit()
    spread.took(ANN, 9, 1.0)
    spread.took(BOB, 3, 1.0)
    assert spread.shares([ANN, BOB], 102) == [76, 26]


def test_a_speed_that_changes_is_believed_by_and_by():
    spread = SpeedSplit()
    spread.took(ANN, 8, 1.0)
    spread.took(BOB, 8, 1.0)
    shares = []
    for _ in range(6):
        spread.took(ANN, 8, 4.0)
        shares.append(spread.shares([ANN, BOB], 100)[0])
    assert shares == sorted(shares, reverse=True)
    assert 20 <= shares[-1] < shares[0] < 50


def test_who_kept_others_waiting_is_at_most_that_fast():
    spread = SpeedSplit()
    spread.took(ANN, 8, 1.0)
    spread.took(BOB, 8, 1.0)
    spread.kept_waiting(ANN, 8, 8.0)
    few, many = spread.shares([ANN, BOB], 100)
    assert few < many / 6
    spread.kept_waiting(BOB, 8, 0.5)
    assert spread.shares([ANN, BOB], 100) == [few, many], "that says nothing new"


@given(SAMPLERS, st.sets(st.binary(min_size=1, max_size=2)), st.integers(0, 99))
def test_of_young_keys_few_are_asked_beside_proven_ones_and_all_where_there_are_none(samplers, young, turn):
    asked = bound_young(dict.fromkeys(samplers, "torch/f32"), young.__contains__, turn)
    proven = [each for each in samplers if each not in young]
    assert [each for each in asked if each not in young] == proven
    if not proven:
        assert list(asked) == samplers
    else:
        assert len(asked) - len(proven) == min(1, len(samplers) - len(proven))


def test_young_keys_take_turns_so_that_each_can_prove_itself():
    samplers = {bytes([number]): "torch/f32" for number in range(40)}
    asked = [bound_young(samplers, lambda key: key[0] >= 20, turn) for turn in range(10)]
    assert all(len(each) == 22 for each in asked)
    assert set().union(*asked) == set(samplers)
