"""Canonical msgpack: exactly one byte form per value.

Maps have strictly ascending string keys, integers and lengths are the shortest, floats are float64,
finite and never -0.0, there are no extension types. Depth, item count and size are bounded before
anything is allocated. Decoding any other form is an error that names the byte, so a hash of the
bytes names one value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgpack

from protocol import limits
from protocol.errors import (
    BadTextError,
    ForbiddenTypeError,
    NotCanonicalError,
    NotFiniteError,
    TooLargeError,
    TrailingBytesError,
    TruncatedError,
)

Value: TypeAlias = bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"] | None

_Reader: TypeAlias = Callable[[bytes, int, int, list[int]], "tuple[Value, int]"]
"""Reads one value: (data, its start, its depth, items left) -> (value, start of the next)."""

_FLOAT64: Final = struct.Struct(">d")


def pack(value: Value) -> bytes:
    """Return the msgpack form of a value already in canonical order (see `order`)."""
    packed: bytes = msgpack.packb(value)
    return packed


def encode(value: Value, *, most: int = limits.GROUP_BYTES, items: int = limits.ITEMS) -> bytes:
    """Encode a value in its one byte form."""
    packed = pack(order(value, items=items))
    if len(packed) > most:
        raise TooLargeError(f"{len(packed)} bytes, at most {most} are allowed")
    return packed


def order(value: Value, *, items: int = limits.ITEMS, depth: int = 1) -> Value:
    """Return the value with its maps in canonical order; raise if it is not encodable.

    `depth` is the value's depth in a larger one.
    """
    return _order(value, depth, [items])


def decode(data: bytes, *, most: int = limits.GROUP_BYTES, items: int = limits.ITEMS) -> Value:
    """Decode a canonical byte form. Arrays become lists, maps become dicts."""
    if len(data) > most:
        raise TooLargeError(f"{len(data)} bytes, at most {most} are allowed")
    try:
        value, end = _READERS[data[0]](data, 0, 1, [items])
    except IndexError:
        raise TruncatedError("ends within a value", f"byte {len(data)}") from None
    if end != len(data):
        raise TrailingBytesError(f"{len(data) - end} bytes after the value", f"byte {end}")
    return value


def _order(value: Value, depth: int, left: list[int]) -> Value:
    kind = type(value)
    if kind is float:
        return _plain_float(value)  # type: ignore[arg-type]
    if value is None or kind is bool or kind is bytes:
        return value
    if kind is int:
        if not -(2**63) <= value < 2**64:  # type: ignore[operator]
            raise TooLargeError(f"integer {value} needs more than 64 bits")
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadTextError("a string with half of a surrogate pair") from None
        return value
    if isinstance(value, Mapping):
        _spend(left, 2 * len(value), depth)
        for key in value:
            _check_key(key)
        return {key: _order(value[key], depth + 1, left) for key in sorted(value)}
    if isinstance(value, list | tuple):
        _spend(left, len(value), depth)
        return [_order(item, depth + 1, left) for item in value]
    raise ForbiddenTypeError(f"{kind.__name__} has no place on the wire")


def _plain_float(value: float) -> float:
    if not math.isfinite(value):
        raise NotFiniteError(f"{value} is not a finite number")
    return value + 0.0  # turns -0.0 into 0.0


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise ForbiddenTypeError(f"a map key of type {type(key).__name__}; only strings are keys")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise BadTextError("a map key with half of a surrogate pair") from None
    if size > limits.KEY_BYTES:
        raise TooLargeError(f"a map key of {size} bytes, at most {limits.KEY_BYTES} are allowed")


def _spend(left: list[int], count: int, depth: int, at: int | None = None) -> None:
    left[0] -= count
    if depth > limits.DEPTH or left[0] < 0:
        what = "too many items" if left[0] < 0 else f"nested deeper than {limits.DEPTH}"
        raise TooLargeError(what, "" if at is None else f"byte {at}")


def _short(data: bytes, at: int, start: int, size: int) -> TruncatedError:
    return TruncatedError(f"{size} bytes announced, {max(0, len(data) - start)} left", f"byte {at}")


def _constant(value: Value) -> _Reader:
    return lambda _data, at, _depth, _left: (value, at + 1)


def _forbidden(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
    raise ForbiddenTypeError(f"msgpack type 0x{data[at]:02x} has no place on the wire", f"byte {at}")


def _float(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
    if at + 9 > len(data):
        raise _short(data, at, at + 1, 8)
    number: float = _FLOAT64.unpack_from(data, at + 1)[0]
    if not math.isfinite(number):
        raise NotFiniteError(f"{number} is not a finite number", f"byte {at}")
    if number == 0.0 and data[at + 1]:
        raise NotCanonicalError("-0.0 is written as 0.0", f"byte {at}")
    return number, at + 9


def _integer(width: int, shorter: range) -> _Reader:
    """Read integers of `width` bytes; those in `shorter` have a shorter form."""
    signed = shorter.start < 0

    def read(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
        end = at + 1 + width
        if end > len(data):
            raise _short(data, at, at + 1, width)
        number = int.from_bytes(data[at + 1 : end], signed=signed)
        if number in shorter or (signed and number >= 0):
            raise NotCanonicalError(f"integer {number} has a shorter form", f"byte {at}")
        return number, end

    return read


def _size(data: bytes, at: int, width: int, shorter: int) -> int:
    """Read a length of `width` bytes; lengths up to `shorter` have a shorter form."""
    if at + 1 + width > len(data):
        raise _short(data, at, at + 1, width)
    size = int.from_bytes(data[at + 1 : at + 1 + width])
    if size <= shorter:
        raise NotCanonicalError(f"length {size} has a shorter form", f"byte {at}")
    return size


def _bytes(width: int, shorter: int) -> _Reader:
    def read(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
        start = at + 1 + width
        end = start + _size(data, at, width, shorter)
        if end > len(data):
            raise _short(data, at, start, end - start)
        return data[start:end], end

    return read


def _fixed_text(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
    """Read strings with the length in the first byte.

    Nearly all are such, so they have a reader of their own.
    """
    end = at + 1 + (data[at] & 0x1F)
    if end > len(data):
        raise _short(data, at, at + 1, end - at - 1)
    try:
        return data[at + 1 : end].decode(), end
    except UnicodeDecodeError:
        raise _bad_text(at) from None


def _text(width: int, shorter: int) -> _Reader:
    def read(data: bytes, at: int, _depth: int, _left: list[int]) -> tuple[Value, int]:
        start = at + 1 + width
        end = start + _size(data, at, width, shorter)
        if end > len(data):
            raise _short(data, at, start, end - start)
        try:
            return data[start:end].decode(), end
        except UnicodeDecodeError:
            raise _bad_text(at) from None

    return read


def _bad_text(at: int) -> BadTextError:
    return BadTextError("a string that is not UTF-8", f"byte {at}")


def _array(width: int, shorter: int) -> _Reader:
    def read(data: bytes, at: int, depth: int, left: list[int]) -> tuple[Value, int]:
        count = _size(data, at, width, shorter) if width else data[at] & 0x0F
        _spend(left, count, depth, at)
        items: list[Value] = []
        at += 1 + width
        depth += 1
        for _ in range(count):
            item, at = _READERS[data[at]](data, at, depth, left)
            items.append(item)
        return items, at

    return read


def _map(width: int, shorter: int) -> _Reader:
    def read(data: bytes, at: int, depth: int, left: list[int]) -> tuple[Value, int]:
        count = _size(data, at, width, shorter) if width else data[at] & 0x0F
        _spend(left, 2 * count, depth, at)
        pairs: dict[str, Value] = {}
        previous = None
        at += 1 + width
        depth += 1
        for _ in range(count):
            place = at
            key, at = _READERS[data[at]](data, at, depth, left)
            if type(key) is not str:
                raise ForbiddenTypeError("a map key that is not a string", f"byte {place}")
            if at - place > limits.KEY_BYTES:
                _check_key(key)
            if previous is not None and key <= previous:  # code points sort as their UTF-8 does
                raise NotCanonicalError(f"key {key!r} after {previous!r}", f"byte {place}")
            pairs[key], at = _READERS[data[at]](data, at, depth, left)
            previous = key
        return pairs, at

    return read


_READERS: Final[list[_Reader]] = [
    *(_constant(number) for number in range(0x80)),
    *[_map(0, -1)] * 16,
    *[_array(0, -1)] * 16,
    *[_fixed_text] * 32,
    _constant(None),
    _forbidden,
    _constant(False),  # noqa: FBT003 - the value false
    _constant(True),  # noqa: FBT003 - the value true
    _bytes(1, -1),
    _bytes(2, 0xFF),
    _bytes(4, 0xFFFF),
    *[_forbidden] * 4,  # three extension types, float32
    _float,
    _integer(1, range(0x80)),
    _integer(2, range(0x100)),
    _integer(4, range(0x1_0000)),
    _integer(8, range(0x1_0000_0000)),
    _integer(1, range(-0x20, 0)),
    _integer(2, range(-0x80, 0)),
    _integer(4, range(-0x8000, 0)),
    _integer(8, range(-0x8000_0000, 0)),
    *[_forbidden] * 5,  # five more extension types
    _text(1, 31),
    _text(2, 0xFF),
    _text(4, 0xFFFF),
    _array(2, 15),
    _array(4, 0xFFFF),
    _map(2, 15),
    _map(4, 0xFFFF),
    *(_constant(number) for number in range(-0x20, 0)),
]
"""Reader for each first byte."""
