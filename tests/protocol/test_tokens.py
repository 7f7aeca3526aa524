"""Token ids and log-probabilities in few bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InconsistentError, OutOfRangeError
from protocol.tokens import bits_for, check_packed, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

columns = st.integers(1, 2**24).flatmap(
    lambda size: st.tuples(st.lists(st.integers(0, size - 1), max_size=70), st.just(size))
)


@given(columns)
def test_ids_survive_the_round_trip(column):
    ids, size = column
    packed = pack_ids(ids, size)
    check_packed(packed, len(ids), bits_for(size), "ids")
    assert unpack_ids(packed, len(ids), bits_for(size)).tolist() == ids


@given(columns)
def test_ids_are_packed_as_the_spec_says(column):
    ids, size = column
    number = sum(value << (bits_for(size) * index) for index, value in enumerate(ids))
    assert pack_ids(ids, size) == number.to_bytes((bits_for(size) * len(ids) + 7) // 8, "little")


def test_packed_ids_have_one_form():
    packed = pack_ids([1, 2, 3], 17)
    check_packed(packed, 3, 5, "ids")
    for wrong in (packed + b"\0", packed[:-1], packed[:-1] + bytes([packed[-1] | 0x80])):
        with pytest.raises(InconsistentError):
            check_packed(wrong, 3, 5, "ids")


@pytest.mark.parametrize(
    ("size", "bits"), [(1, 1), (2, 1), (3, 2), (16, 4), (17, 5), (151_936, 18), (2**24, 24)]
)
def test_the_width_is_that_of_the_largest_id(size, bits):
    assert bits_for(size) == bits


@pytest.mark.parametrize("size", [0, -1, 2**24 + 1])
def test_a_vocabulary_beyond_the_limit_is_refused(size):
    with pytest.raises(OutOfRangeError):
        bits_for(size)


@pytest.mark.parametrize("ids", [[-1], [16], [0, 99]])
def test_an_id_outside_the_vocabulary_is_not_written(ids):
    with pytest.raises(OutOfRangeError):
        pack_ids(ids, 16)


@given(st.lists(st.floats(-63.9, 0.0), max_size=50))
def test_log_probabilities_survive_within_half_a_step(values):
    read = unpack_logprobs(pack_logprobs(values))
    assert np.all(np.abs(read - np.array(values)) <= 2.0**-19)
    assert pack_logprobs(read) == pack_logprobs(values)


def test_log_probabilities_beyond_the_floor_stay_there():
    assert unpack_logprobs(pack_logprobs([-64.0, -1e300, -np.inf])).tolist() == [-(2**24 - 1) / 2**18] * 3


@pytest.mark.parametrize("value", [np.nan, 1e-9, np.inf])
def test_what_is_no_log_probability_is_not_written(value):
    with pytest.raises(OutOfRangeError):
        pack_logprobs([value])
