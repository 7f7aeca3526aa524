"""Several sealed messages in one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import canonical, fill_batches, limits, read_batch, seal, write_batch
from protocol.errors import ProtocolError, TooLargeError

from .examples import RUN, SAMPLER, SEALED_GROUP, SEALED_JOIN, group

SEALED = [SEALED_JOIN, SEALED_GROUP, seal(group(2, 20), SAMPLER, RUN)]


@given(st.lists(st.sampled_from(SEALED), min_size=1, max_size=60))
def test_a_batch_gives_back_what_was_put_in(sealed):
    assert [envelope.sealed for envelope in read_batch(write_batch(sealed))] == sealed


@given(st.lists(st.sampled_from([*SEALED, seal(group(8, 256), SAMPLER, RUN)]), max_size=700))
def test_filling_batches_loses_nothing_and_wastes_little(sealed):
    batches = fill_batches(sealed)
    assert [envelope.sealed for batch in batches for envelope in read_batch(batch)] == sealed
    assert all(len(batch) <= limits.GOSSIP_BYTES for batch in batches)
    for before, after in itertools.pairwise(batches):
        room = limits.GOSSIP_BYTES - len(before)
        assert room < len(read_batch(after)[0].sealed) + 64 or len(read_batch(before)) == limits.BATCH


def test_a_batch_with_one_bad_envelope_is_refused_whole():
    for bad in (SEALED_GROUP[:-1], b"", b"\x90", SEALED_GROUP + b"\0"):
        with pytest.raises(ProtocolError) as caught:
            read_batch(canonical.pack([SEALED_JOIN, bad]))
        assert caught.value.where.startswith("batch[1]")


@pytest.mark.parametrize("data", [b"\x90", b"\x80", b"\xc0", b"\x91\xc0", canonical.pack([b"\xc0"] * 513)])
def test_what_is_no_batch_is_refused(data):
    with pytest.raises(ProtocolError):
        read_batch(data)


def test_a_batch_that_does_not_fit_is_not_written():
    large = seal(group(8, 2000), SAMPLER, RUN)
    assert len(large) > limits.GOSSIP_BYTES, "so it travels by reference"
    for sealed in ([], [large], [SEALED_JOIN] * 513):
        with pytest.raises(TooLargeError):
            write_batch(sealed)
