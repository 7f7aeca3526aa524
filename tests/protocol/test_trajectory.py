"""Groups of completions."""

import dataclasses

import numpy as np
from hypothesis import given

from protocol import Stretch, TrajectoryGroup, limits, seal

from .examples import RUN, SAMPLER, SMALL_GROUP, group
from .strategies import groups


def test_a_group_takes_at_most_six_bytes_a_token():
    sealed = seal(group(8, 256), SAMPLER, RUN)
    assert len(sealed) <= 6 * 8 * 256
    assert len(sealed) <= limits.GOSSIP_BYTES


@given(groups())
def test_columns_give_back_the_completions_that_were_put_in(made):
    again = TrajectoryGroup.of(
        prompt=made.prompt_ids(),
        completions=made.completions(),
        engine=made.engine,
        heads=made.heads,
        slot=made.slot,
        vocabulary=1 << made.bits,
    )
    assert again == made


def test_a_completion_knows_whose_each_token_is():
    first, second = SMALL_GROUP.completions()
    assert first.stretches == (Stretch(0, 5, 0),)
    assert second.stretches == (Stretch(0, 3, 0), Stretch(3, 5, None), Stretch(5, 9, 1))
    assert np.all(second.logprobs[3:5] == 0)
    assert SMALL_GROUP.prompt_ids().tolist() == [1, 2, 3, 151_935]
    assert SMALL_GROUP.token_count == 14


def test_a_completion_that_switches_heads_at_once_is_wholly_the_later_heads():
    later = dataclasses.replace(SMALL_GROUP.spans[1][1], start=0, length=9)
    switched = dataclasses.replace(SMALL_GROUP, spans=((), (later,)))
    assert switched.stretches(1) == (Stretch(0, 9, 1),)
