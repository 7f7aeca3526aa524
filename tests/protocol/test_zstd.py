"""One zstd frame, bounded before it is opened."""

import time
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol import ProtocolError, limits
from protocol.errors import BadFrameError, InconsistentError, TooLargeError
from protocol.zstd import decode_raw, encode_raw, pack_columns, unpack

from .frames import faulty_zstd, header, plain_frame, repeated, stored

CONTENT = bytes(range(40))


@given(st.binary(min_size=1, max_size=3000))
def test_a_raw_chunk_comes_back_whole_or_not_at_all(chunk):
    frame = encode_raw(chunk)
    assert decode_raw(frame, len(chunk)) == chunk
    with pytest.raises(TooLargeError):
        decode_raw(frame, len(chunk) - 1)
    with pytest.raises(InconsistentError):
        decode_raw(frame, len(chunk) + 1)


def test_the_largest_raw_chunk_fits_into_the_largest_frame():
    chunk = np.random.default_rng(1).bytes(4 * limits.CHUNK_ELEMENTS)
    frame = encode_raw(chunk)
    assert len(chunk) < len(frame) <= limits.FRAME_BYTES
    assert decode_raw(frame, len(chunk)) == chunk


@given(st.lists(st.binary(max_size=400), min_size=1).filter(any))
def test_columns_come_back_in_a_row(columns):
    joined = b"".join(columns)
    assert unpack(pack_columns(columns), len(joined)) == joined


@pytest.mark.parametrize("what", faulty_zstd(CONTENT))
def test_a_frame_that_is_not_one_bounded_zstd_frame_is_refused(what):
    with pytest.raises(BadFrameError):
        unpack(faulty_zstd(CONTENT)[what], 1000)
    assert unpack(plain_frame(CONTENT), 1000) == CONTENT


@pytest.mark.parametrize("level", [-5, 1, 3, 9, 19])
def test_how_a_content_was_compressed_is_free(level):
    content = (CONTENT * 40_000)[:1_500_000]
    assert unpack(zstandard.ZstdCompressor(level=level).compress(content), len(content)) == content


def test_a_zip_bomb_is_refused_before_it_is_opened():
    """A gigabyte that is stated is not allocated; one that is not stated is not written."""
    blocks = repeated(0, 131_072, last=False) * 8191 + repeated(0, 131_072)
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        unpack(header(2**30) + blocks, 16_777_220)
    with pytest.raises(BadFrameError):
        unpack(header(1000) + blocks, 16_777_220)
    with pytest.raises(BadFrameError):
        unpack(header(1000, window=13 << 3) + blocks, 16_777_220)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_a_frame_beyond_the_limit_is_not_looked_at():
    with pytest.raises(TooLargeError):
        unpack(plain_frame(CONTENT) + bytes(limits.FRAME_BYTES), 1000)


def test_millions_of_empty_blocks_take_no_time():
    frame = header(40) + stored(b"", last=False) * (limits.FRAME_BYTES // 3 - 20) + stored(CONTENT)
    start = time.thread_time()
    assert unpack(frame, 40) == CONTENT
    assert time.thread_time() - start < 2


def test_frames_that_were_cut_anywhere_are_refused():
    frame = encode_raw(np.random.default_rng(2).binomial(9, 0.1, 5000).astype(np.uint8).tobytes())
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            unpack(frame[:end], 5000)
