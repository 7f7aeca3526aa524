"""Luck that nobody chooses."""

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol import sampling
from protocol.identity import peer_id_bytes

from .examples import RUN, SAMPLER, STRANGER, name

KEY = sampling.slot_key(RUN, name("head"), SAMPLER.public, 5)
rows = st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda row: sum(row) > 0.01)
unit = st.integers(0, 2**53 - 1).map(lambda n: n * 2.0**-53)


def test_the_stream_of_uniform_numbers_is_the_one_of_the_spec():
    beacon = blake3(name("head"), derive_key_context="echo/beacon/2").digest()
    material = RUN + beacon + peer_id_bytes(SAMPLER.public) + (5).to_bytes(8)
    key = blake3(material, derive_key_context="echo/slot/2").digest()
    assert key == KEY
    assert sampling.prompt_key(key) == blake3(b"prompt", key=key).digest()
    for completion, start in ((0, 0), (3, 7), (255, 100_000)):
        raw = blake3(b"u" + completion.to_bytes(4), key=key).digest(length=8, seek=8 * start)
        expected = (int.from_bytes(raw, "little") >> 11) / 2**53
        assert sampling.uniforms(KEY, completion, 1, start)[0] == expected


@given(st.integers(0, 300), st.integers(0, 50), st.integers(0, 300))
def test_a_stream_read_in_pieces_is_the_same_stream(completion, count, start):
    whole = sampling.uniforms(KEY, completion, start + count)
    assert np.array_equal(sampling.uniforms(KEY, completion, count, start), whole[start:])
    assert np.all((whole >= 0) & (whole < 1))


def test_every_part_of_a_slot_changes_its_key():
    keys = {
        sampling.slot_key(run, head, who.public, slot)
        for run in (RUN, name("run"))
        for head in (name("head"), name("next"))
        for who in (SAMPLER, STRANGER)
        for slot in (0, 1, 2**53 - 1)
    }
    assert len(keys) == 24


def test_uniform_numbers_are_uniform():
    numbers = sampling.uniforms(KEY, 0, 100_000)
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    chi_squared = np.sum((counts - 2000) ** 2 / 2000)
    assert chi_squared < 95, "99.99 % of honest streams lie below"


@given(rows, unit)
def test_a_draw_is_the_inverse_of_the_cumulative_sum(row, u):
    probability = np.array(row)
    token = int(sampling.draw(probability[None], [u])[0])
    total = cumulative = 0.0
    for value in row:
        total += value
    for index, value in enumerate(row):  # noqa: B007 - the index that the loop stops at
        cumulative += value
        if u * total < cumulative:
            break
    assert token == index
    assert probability[token] > 0


def test_draws_follow_the_probabilities():
    probability = sampling.probabilities([0.0, 1.0, -1.0, 2.0], temperature=0.8)
    numbers = sampling.uniforms(KEY, 1, 40_000)
    tokens = sampling.draw(np.tile(probability, (40_000, 1)), numbers)
    expected = probability * 40_000
    assert np.sum((np.bincount(tokens, minlength=4) - expected) ** 2 / expected) < 21.1, (
        "0.01 % lie above, 3 degrees"
    )


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=9), st.floats(0.1, 5))
def test_probabilities_are_the_softmax_at_the_temperature(logits, temperature):
    shifted = [(x - max(logits)) / temperature for x in logits]
    expected = np.exp(shifted) / np.sum(np.exp(shifted))
    assert np.allclose(sampling.probabilities(logits, temperature), expected, rtol=1e-12, atol=1e-300)


@given(rows, unit)
def test_an_honest_token_has_no_distance(row, u):
    probability = np.array([row]) / np.sum(row)
    found = sampling.replay(probability, sampling.draw(probability, [u]), [u])
    assert found.d[0] <= 1e-15
    assert found.z[0] <= 1e-6


@given(rows, unit, st.integers(0, 8))
def test_the_scaled_distance_is_the_formula_of_the_spec(row, u, claimed):
    claimed %= len(row)
    p = np.array(row) / np.sum(row)
    found = sampling.replay(p[None], [claimed], [u])
    c = np.cumsum(p)
    low, high = (c[claimed - 1] if claimed else 0.0), c[claimed]
    d = max(low - u, u - high, 0.0)
    if d < 1e-12:
        return
    last = claimed - 1 if low > u else claimed
    f = low if low > u else high
    s2 = sum(p[: last + 1] ** 2)
    spread = (1 - f) ** 2 * s2 + f**2 * (sum(p**2) - s2) + 0.25 * (f * (1 - f)) ** 2
    assert np.isclose(found.d[0], d, rtol=1e-9)
    if spread > 1e-20:
        assert np.isclose(found.z[0], d / np.sqrt(spread), rtol=1e-6)
    assert 0 < found.z[0] <= sampling.FARTHEST


def test_a_token_that_could_not_be_drawn_is_as_far_as_can_be():
    found = sampling.replay(np.array([[0.0, 1.0], [1.0, 0.0]]), [0, 1], [0.5, 0.5])
    assert found.d.tolist() == [0.5, 0.5]
    assert found.z.tolist() == [sampling.FARTHEST] * 2
