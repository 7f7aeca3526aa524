"""One byte form per value, and no other."""

import math
import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import canonical, limits
from protocol.errors import (
    BadTextError,
    ForbiddenTypeError,
    NotCanonicalError,
    NotFiniteError,
    ProtocolError,
    TooLargeError,
    TrailingBytesError,
    TruncatedError,
)

from .strategies import values


def refused(data: bytes | str, error: type[ProtocolError]) -> ProtocolError:
    with pytest.raises(error) as caught:
        canonical.decode(bytes.fromhex(data) if isinstance(data, str) else data)
    return caught.value


@given(values)
def test_every_value_survives_the_round_trip(value):
    data = canonical.encode(value)
    assert canonical.decode(data) == value
    assert canonical.encode(canonical.decode(data)) == data


@given(values)
def test_the_bytes_are_plain_msgpack(value):
    assert msgpack.unpackb(canonical.encode(value), strict_map_key=False) == value


@given(st.binary(max_size=60))
def test_a_value_has_one_byte_form(data):
    """Whatever decodes at all is the encoding of what it decodes to."""
    try:
        value = canonical.decode(data)
    except ProtocolError:
        return
    assert canonical.encode(value) == data


@given(values, st.data())
def test_a_value_in_another_order_of_keys_has_the_same_bytes(value, data):
    def shuffled(inner):
        if isinstance(inner, dict):
            return {key: shuffled(inner[key]) for key in data.draw(st.permutations(list(inner)))}
        return [shuffled(item) for item in inner] if isinstance(inner, list) else inner

    assert canonical.encode(shuffled(value)) == canonical.encode(value)


@pytest.mark.parametrize(
    "data", ["c1", "ca3f800000", "d401ff", "d6ff00000000", "c70101ff", "c8000101ff", "c90000000101ff"]
)
def test_foreign_types_are_refused(data):
    refused(data, ForbiddenTypeError)


@pytest.mark.parametrize(
    "data",
    [
        *("cc7f", "cd00ff", "ce0000ffff", "cf00000000ffffffff", "d0e0", "d000", "d1ff80", "d2ffff8000"),
        *("d3ffffffff80000000", "d90161", "da001f" + "61" * 31, "db0000000161", "c5000101", "c60000000101"),
        *("dc000101", "dd0000000101", "de0001a16101", "df00000001a16101"),
    ],
)
def test_longer_forms_are_refused(data):
    assert msgpack.unpackb(bytes.fromhex(data)) is not None, "msgpack itself would take it"
    refused(data, NotCanonicalError)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_refused(number):
    refused(b"\xcb" + struct.pack(">d", number), NotFiniteError)
    with pytest.raises(NotFiniteError):
        canonical.encode([number])


def test_negative_zero_is_refused():
    refused("cb8000000000000000", NotCanonicalError)
    assert canonical.encode(-0.0) == canonical.encode(0.0)


@pytest.mark.parametrize("data", ["a180", "a2c080", "a3eda080", "a4f4908080"])
def test_text_that_is_not_utf8_is_refused(data):
    refused(data, BadTextError)


def test_half_a_surrogate_pair_is_not_written():
    for value in ("\ud800", {"\ud800": 1}):
        with pytest.raises(BadTextError):
            canonical.encode(value)


def test_keys_are_strings_of_bounded_length():
    refused("810102", ForbiddenTypeError)
    refused("81c4016102", ForbiddenTypeError)
    longest = "k" * limits.KEY_BYTES
    assert canonical.decode(canonical.encode({longest: 1})) == {longest: 1}
    refused(msgpack.packb({longest + "k": 1}), TooLargeError)
    for key in (longest + "k", 7):
        with pytest.raises(ProtocolError):
            canonical.encode({key: 1})


def test_keys_out_of_order_or_twice_are_refused():
    refused("82a16201a16102", NotCanonicalError)
    refused("82a16101a16102", NotCanonicalError)
    refused("82a001a002", NotCanonicalError)
    assert canonical.decode(bytes.fromhex("82a001a16102")) == {"": 1, "a": 2}
    # U+FFFF comes before U+1F600 in UTF-8, and after it in UTF-16
    assert list(canonical.decode(canonical.encode({"\U0001f600": 1, "\uffff": 2}))) == [
        "\uffff",
        "\U0001f600",
    ]


def nested(depth: int) -> bytes:
    return b"\x91" * (depth - 1) + b"\x90"


def test_depth_items_and_size_are_bounded():
    canonical.decode(nested(limits.DEPTH))
    refused(nested(limits.DEPTH + 1), TooLargeError)
    refused(b"\x91" * 100_000, TooLargeError)
    full = [None] * limits.ITEMS
    assert canonical.decode(canonical.encode(full)) == full
    refused(msgpack.packb([None] * (limits.ITEMS + 1)), TooLargeError)
    refused(msgpack.packb([[None] * 100] * 163), TooLargeError)
    assert canonical.decode(b"\xc4\x02\x01\x02", most=4) == b"\x01\x02"
    with pytest.raises(TooLargeError):
        canonical.decode(b"\xc4\x02\x01\x02", most=3)
    for value in ([*full, None], [[]] * (limits.ITEMS + 1), 2**64, -(2**63) - 1):
        with pytest.raises(TooLargeError):
            canonical.encode(value)


def test_bytes_after_the_value_are_refused():
    refused("0102", TrailingBytesError)


def test_bytes_that_end_early_are_refused_wherever_they_end():
    data = canonical.encode({"a": [1.5, "text", b"x" * 300, -70_000, 2**40], "b": None})
    for end in range(len(data)):
        refused(data[:end], TruncatedError)


def test_an_error_names_the_byte():
    assert refused("930102cc05", NotCanonicalError).where == "byte 3"


@pytest.mark.parametrize(
    "data",
    [
        "dd" + "ffffffff",
        "df" + "ffffffff",
        "dd00003fff" * 2000,
        "df00001fff" * 2000,
        "c6ffffffff",
        "dbffffffff",
        "dc4001" + "80" * 0x4001,
        "91" * 1_000_000,
    ],
    ids=["array", "map", "arrays", "maps", "bytes", "text", "empty maps", "deep"],
)
def test_what_is_announced_is_not_allocated(data):
    raw = bytes.fromhex(data)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            canonical.decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, bytearray(b"x"), memoryview(b"x")])
def test_foreign_objects_are_not_written(value):
    with pytest.raises(ForbiddenTypeError):
        canonical.encode(value)
