"""Questions about blobs, and what is said at the door for the large ones."""

import dataclasses

import pytest

from protocol import decode, encode, limits
from protocol.blob import BlobRead, BlobWants, BulkAsk, Slice, bulk_pass
from protocol.errors import InconsistentError, OutOfRangeError

from .examples import BULK_ASK, SAMPLER, SLICES, STRANGER, WANTS, name
from .idl import SPEC


def test_a_want_list_gives_its_ids_back_in_their_order():
    ids = [name("b"), name("a"), name("b")]
    assert decode(BlobWants, encode(BlobWants.of(ids))).ids() == ids


def test_more_than_256_wants_or_none_are_refused():
    full = BlobWants.of(name(str(index)) for index in range(limits.WANTS))
    assert len(decode(BlobWants, encode(full)).ids()) == 256
    for wrong in (BlobWants(full.blobs + name("one more")), BlobWants(b""), BlobWants(WANTS.blobs[:-1])):
        with pytest.raises(OutOfRangeError):
            encode(wrong)


def test_the_longest_questions_fit_into_their_bytes():
    slices = tuple(Slice(name(str(n)), limits.SAFE_INTEGER, limits.BULK_BYTES // 256) for n in range(256))
    assert len(encode(BulkAsk(slices))) <= limits.SLICES_BYTES
    encode(BlobRead(tuple(dataclasses.replace(each, length=limits.READ_BYTES // 256) for each in slices)))
    with pytest.raises(InconsistentError):
        encode(BlobRead(slices))


def test_a_pass_is_bound_to_the_token_the_asker_and_every_slice():
    token, asker = name("a token"), SAMPLER.public
    other = dataclasses.replace(BULK_ASK.slices[0], offset=1)
    passes = {
        bulk_pass(token, asker, BULK_ASK),
        bulk_pass(name("another token"), asker, BULK_ASK),
        bulk_pass(token, STRANGER.public, BULK_ASK),
        bulk_pass(token, asker, BulkAsk((other,))),
        bulk_pass(token, asker, BulkAsk(SLICES)),
        bulk_pass(token, asker, BulkAsk(SLICES[::-1])),
    }
    assert len(passes) == 6
    assert all(len(each) == 32 for each in passes)


def test_the_spec_names_what_a_stream_and_the_door_carry():
    section = SPEC.read_text().split("\n## blob\n")[1].split("\n## ")[0]
    assert f"at most {limits.READ_BYTES:,} bytes" in section
    assert f"\n{limits.BULK_BYTES:,}." in section
