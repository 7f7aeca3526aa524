"""What changed in a chunk of 16-bit patterns: lossless, one body per change, refused before the
first write.
"""

import random
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import ProtocolError, decode_delta, encode_delta, limits
from protocol.delta import decode_positions, most_body, read_body, write_columns
from protocol.errors import InconsistentError, OutOfRangeError, TooLargeError, WrongTypeError
from protocol.zstd import unpack

from .frames import bombs, faulty_bodies, faulty_zstd, plain_frame, stories

EVERY_PATTERN = np.arange(65_536, dtype=np.uint16)
FAULTY = {what: (base, plain_frame(data)) for what, (base, data) in faulty_bodies().items()}
FAULTY |= {
    what: (np.arange(8, dtype=np.uint16), frame)
    for what, frame in (faulty_zstd(b"\1\0\0\0\0\2") | bombs()).items()
}


def round_trip(base: np.ndarray, new: np.ndarray) -> bytes:
    """Encode and write; the base, which nothing may touch, is locked."""
    locked = base.copy()
    locked.setflags(write=False)
    frame = encode_delta(locked, new)
    delta = decode_delta(frame, locked)
    written = base.copy()
    delta.write(written)
    assert np.array_equal(written, new)
    assert np.array_equal(delta.positions, np.flatnonzero(base != new))
    return frame


def spelled_out(base: list[int], new: list[int]) -> bytes:
    """The body as SPEC.md says it, one element at a time."""
    gaps, steps, full, gap = b"", b"", b"", 0
    for old, now in zip(base, new, strict=True):
        if old == now:
            gap += 1
            continue
        gaps += b"\xff" * (gap // 255) + bytes([gap % 255])
        gap = 0
        step = (now - old + 2**15) % 2**16 - 2**15
        zigzag = 2 * step if step >= 0 else -2 * step - 1
        steps += bytes([min(zigzag, 255)])
        full += now.to_bytes(2, "little") if zigzag >= 255 else b""
    return len(gaps).to_bytes(4, "little") + gaps + steps + full if gaps else b""


def drawn(seed: int, elements: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """Small weights in bf16, and the same after a step: most of what changes does so by one unit in
    the last place.
    """
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal(elements, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice([1, -1, 2, -3, 90, 5000], elements, p=[0.45, 0.43, 0.05, 0.05, 0.01, 0.01])
    return base, base + np.where(rng.random(elements) < density, steps, 0).astype(np.uint16)


chunks = st.integers(0, 600).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 65_535), min_size=size, max_size=size),
        st.dictionaries(st.integers(0, max(0, size - 1)), st.integers(0, 65_535), max_size=size),
    )
)


@given(chunks)
def test_a_change_has_exactly_one_body(chunk):
    old, changes = chunk
    new = [changes.get(at, pattern) for at, pattern in enumerate(old)]
    base = np.array(old, np.uint16)
    frame = round_trip(base, np.array(new, np.uint16))
    body = unpack(frame, most_body(len(old))) if frame else b""
    assert body == spelled_out(old, new)


@given(chunks)
def test_where_a_frame_changes_something_is_read_without_the_base(case):
    values, changes = case
    base = np.array(values, np.uint16)
    new = base.copy()
    for at, value in changes.items() if values else ():
        new[at] = value
    found = decode_positions(encode_delta(base, new), base.size)
    assert found.tolist() == np.flatnonzero(base != new).tolist()


@pytest.mark.parametrize("shift", [0, 1, 2, 126, 127, 128, 129, 255, 256, 32_767, 32_768])
def test_every_bit_pattern_survives_in_both_directions(shift):
    """All of them at once: zeros of both signs, subnormals, infinities, NaNs with every payload."""
    round_trip(EVERY_PATTERN, EVERY_PATTERN + np.uint16(shift))
    round_trip(EVERY_PATTERN + np.uint16(shift), EVERY_PATTERN)


@pytest.mark.parametrize("pattern", [0x0000, 0x8000, 0x0001, 0x3F80, 0x7F80, 0x7FC1, 0xFFFF])
def test_from_one_pattern_to_every_other_and_back(pattern):
    round_trip(np.full(65_536, pattern, np.uint16), EVERY_PATTERN)
    round_trip(EVERY_PATTERN, np.full(65_536, pattern, np.uint16))


def test_a_zero_that_changes_its_sign_has_changed_and_a_nan_that_stays_has_not():
    base = np.array([0x0000, 0x8000, 0x7FC1, 0xFFFF], np.uint16)
    assert encode_delta(base, base.copy()) == b""
    frame = encode_delta(base, np.array([0x8000, 0x0000, 0x7FC1, 0xFFFF], np.uint16))
    assert decode_delta(frame, base).positions.tolist() == [0, 1]


@pytest.mark.parametrize("density", [0.0, 1e-5, 1e-3, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("elements", [0, 1, 2, 255, 256, 257, 5000, 300_001])
def test_every_size_and_density_survives(elements, density):
    round_trip(*drawn(7, elements, density))


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_a_state_of_several_chunks_survives(density):
    base, new = drawn(8, 2 * limits.CHUNK_ELEMENTS + 12_345, density)
    for start in range(0, base.size, limits.CHUNK_ELEMENTS):
        place = slice(start, start + limits.CHUNK_ELEMENTS)
        assert len(round_trip(base[place], new[place])) < limits.FRAME_BYTES


def test_the_worst_chunk_fits_into_a_frame():
    rng = np.random.default_rng(9)
    base = rng.integers(0, 65_536, limits.CHUNK_ELEMENTS, dtype=np.uint16)
    new = base + rng.integers(1000, 60_000, limits.CHUNK_ELEMENTS, dtype=np.uint16)
    tracemalloc.start()
    frame = encode_delta(base, new)
    delta = decode_delta(frame, base)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(frame) < limits.FRAME_BYTES
    assert np.array_equal(delta.values, new)
    assert peak < 40 * base.size, "both together take less than twenty chunks"


def test_several_deltas_squash_into_the_one_between_the_ends():
    """What moved and came back is not in it."""
    base, middle = drawn(10, 20_000, 0.05)
    new = np.where(np.arange(20_000) % 2, base, middle)
    squashed = round_trip(base, new)
    assert len(decode_delta(squashed, base)) < len(decode_delta(encode_delta(base, middle), base))
    steps = (encode_delta(base, middle), encode_delta(middle, new))
    state = base.copy()
    for frame in steps:
        decode_delta(frame, state).write(state)
    assert np.array_equal(state, new)
    assert len(squashed) < sum(map(len, steps))


@pytest.mark.parametrize("what", stories())
def test_a_frame_of_another_hand_is_read(what):
    story = stories()[what]
    body = b"".join(write_columns(story.base, story.new))
    delta = decode_delta(story.frame or plain_frame(body), story.base)
    written = story.base.copy()
    delta.write(written)
    assert np.array_equal(written, story.new)


@pytest.mark.parametrize("what", FAULTY)
def test_a_faulty_body_is_refused_by_name_and_writes_nothing(what):
    base, frame = FAULTY[what]
    before = base.copy()
    with pytest.raises(ProtocolError) as caught:
        decode_delta(frame, base)
    assert caught.value.reason in {
        *("bad-frame", "too-large", "truncated", "trailing-bytes", "out-of-range", "not-canonical")
    }
    assert np.array_equal(base, before)


def test_only_rows_of_16_bit_patterns_are_chunks():
    base = np.zeros(8, np.uint16)
    for other in (np.zeros(8, np.float16), np.zeros(8, np.int16), np.zeros((2, 4), np.uint16)):
        with pytest.raises(WrongTypeError):
            encode_delta(base, other)
        with pytest.raises(WrongTypeError):
            decode_delta(b"", other)
    with pytest.raises(InconsistentError):
        encode_delta(base, np.zeros(9, np.uint16))
    with pytest.raises(OutOfRangeError):
        decode_delta(b"", np.zeros(limits.CHUNK_ELEMENTS + 1, np.uint16))


class Mutants:
    """Frames with a few changed bytes: half of them in zstd's own, half in the body within a frame
    that is right.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.base, new = drawn(seed, 2000, 0.05)
        self.base.setflags(write=False)
        self.frame = encode_delta(self.base, new)
        self.body = unpack(self.frame, most_body(2000))

    def draw(self) -> bytes:
        within = self.rng.random() < 0.5
        data = bytearray(self.body if within else self.frame)
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            at = self.rng.randrange(len(data))
            match self.rng.randrange(5):
                case 0:
                    data[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    data[at] = self.rng.choice((0, 1, 254, 255))
                case 2:
                    del data[at : at + self.rng.randrange(1, 4)]
                case 3:
                    data[at:at] = self.rng.randbytes(self.rng.randrange(1, 4))
                case _:
                    data[at], data[-1] = data[-1], data[at]
        return plain_frame(bytes(data)) if within else bytes(data)


@pytest.mark.parametrize("frames", [25_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_frames_are_refused_or_are_some_other_change(frames):
    """Nothing but a ProtocolError comes out, and the base, which is locked, is never written."""
    mutants = Mutants(11)
    outcomes: Counter[str] = Counter()
    start = time.thread_time()
    for _ in range(frames):
        try:
            delta = decode_delta(mutants.draw(), mutants.base)
        except ProtocolError as error:
            outcomes[error.reason] += 1
            continue
        outcomes["another change"] += 1
        assert delta.positions.dtype == np.uint32
        assert delta.values.dtype == np.uint16
        assert len(delta) == delta.values.size > 0
        assert int(delta.positions[-1]) < mutants.base.size
        assert (np.diff(delta.positions.astype(np.int64)) > 0).all()
        assert (delta.values != mutants.base[delta.positions]).all()
    assert time.thread_time() - start < 60
    assert outcomes.total() == frames
    reached = {"bad-frame", "truncated", "trailing-bytes", "out-of-range", "not-canonical", "another change"}
    assert reached <= set(outcomes)


def test_no_mutated_frame_takes_more_memory_than_a_bound():
    mutants = Mutants(12)
    for _ in range(3000):
        frame = mutants.draw()
        tracemalloc.start()
        try:
            decode_delta(frame, mutants.base)
        except ProtocolError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 20_000 + 30 * mutants.base.size


def test_what_a_body_may_hold_follows_from_the_chunk():
    """A frame for a large chunk is a bomb for a small one."""
    base, new = drawn(13, 100_000, 1.0)
    with pytest.raises(TooLargeError):
        decode_delta(encode_delta(base, new), base[:1000])
    with pytest.raises(OutOfRangeError):
        read_body(b"".join(write_columns(base, new)), base[:-1])


def test_chunks_may_be_done_side_by_side():
    pairs = [drawn(seed, 50_000, 0.02) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        frames = list(pool.map(lambda pair: round_trip(*pair), pairs))
    assert frames == [encode_delta(*pair) for pair in pairs]
