"""Field codecs: one small codec per shape, each with its bounds.

A codec checks a canonical value on the way in (`load`) and ours on the way out (`dump`), by the
same rules, so that a node cannot send what others would refuse.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

from protocol import canonical, limits
from protocol.canonical import Value
from protocol.digest import DIGEST_BYTES
from protocol.errors import (
    InconsistentError,
    OutOfRangeError,
    ProtocolError,
    WrongTypeError,
)
from protocol.identity import SIGNATURE_BYTES, check_key

Load: TypeAlias = Callable[[Any], Any]

# Characters that move the cursor, end a line or turn the direction of text: not in texts for
# people.
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_SHOWN: Final = 48
_FREE_MAP_DEPTH: Final = 3
"""Deepest place of a free map (a contract's parameters in a manifest): each map must fit there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """Checks a value on the way in (`load`) and on the way out (`dump`)."""

    load: Load
    dump: Load


def plain(load: Load) -> Codec:
    """Make a codec whose value looks the same on both sides."""
    return Codec(load, load)


def _expect(value: object, kind: type, name: str) -> None:
    if type(value) is not kind:
        raise WrongTypeError(f"{show(value)} is not {name}")


def show(value: object) -> str:
    text = repr(value) if not isinstance(value, bytes | list | tuple | Mapping) else type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def uint(most: int = limits.SAFE_INTEGER, least: int = 0) -> Codec:
    def load(value: Any) -> int:
        if type(value) is not int:
            raise WrongTypeError(f"{show(value)} is not an integer")
        if not least <= value <= most:
            raise OutOfRangeError(f"{value} is not between {least} and {most}")
        return value

    return plain(load)


def number(least: float, most: float) -> Codec:
    def load(value: Any) -> float:
        if type(value) is not float:
            raise WrongTypeError(f"{show(value)} is not a float64")
        if not least <= value <= most:
            raise OutOfRangeError(f"{value} is not between {least} and {most}")
        return value

    def dump(value: Any) -> float:
        if type(value) is int:
            value = float(value)
        return load(value) + 0.0

    return Codec(load, dump)


def _flag(value: Any) -> bool:
    _expect(value, bool, "true or false")
    return bool(value)


flag: Final[Codec] = plain(_flag)


def text(most: int = limits.TEXT_BYTES, least: int = 0) -> Codec:
    """Make a codec for text that people read: UTF-8, one line, no control characters."""

    def load(value: Any) -> str:
        if type(value) is not str:
            raise WrongTypeError(f"{show(value)} is not a string")
        size = len(value.encode(errors="surrogatepass"))
        if not least <= size <= most:
            raise OutOfRangeError(f"{size} bytes of text, not between {least} and {most}")
        if _UNPRINTABLE.search(value):
            raise OutOfRangeError("text with control characters")
        return value

    return plain(load)


def pattern(expression: str, most: int, name: str) -> Codec:
    """Make a codec for ASCII text of one form, such as a tensor's name."""
    compiled = re.compile(expression)

    def load(value: Any) -> str:
        if type(value) is not str:
            raise WrongTypeError(f"{show(value)} is not a string")
        if len(value) > most or not compiled.fullmatch(value):
            raise OutOfRangeError(f"{show(value)} is not {name} of at most {most} characters")
        return value

    return plain(load)


def choice(*names: str) -> Codec:
    def load(value: Any) -> str:
        if type(value) is not str:
            raise WrongTypeError(f"{show(value)} is not a string")
        if value not in names:
            raise OutOfRangeError(f"{show(value)} is none of {', '.join(names)}")
        return value

    return plain(load)


def blob(most: int, least: int = 0, multiple: int = 1) -> Codec:
    def load(value: Any) -> bytes:
        if type(value) is not bytes:
            raise WrongTypeError(f"{show(value)} is not bytes")
        if not least <= len(value) <= most or len(value) % multiple:
            unit = f" in steps of {multiple}" if multiple > 1 else ""
            raise OutOfRangeError(f"{len(value)} bytes, not between {least} and {most}{unit}")
        return value

    return plain(load)


def _key(value: Any) -> bytes:
    _expect(value, bytes, "bytes")
    check_key(value)
    return bytes(value)


def optional(codec: Codec) -> Codec:
    load, dump = codec.load, codec.dump
    return Codec(
        lambda value: None if value is None else load(value),
        lambda value: None if value is None else dump(value),
    )


def array(codec: Codec, most: int, least: int = 0, *, ascending: bool = False) -> Codec:
    """Make a codec for a tuple of bounded length.

    `ascending` means strictly, so that a set has one form.
    """

    def each(values: Sequence[Any], convert: Load) -> list[Any]:
        if not least <= len(values) <= most:
            raise OutOfRangeError(f"{len(values)} items, not between {least} and {most}")
        try:
            converted = [convert(value) for value in values]
        except ProtocolError as error:
            error.within(f"[{_first_fault(convert, values)}]")
            raise
        if ascending:
            check_ascending(converted)
        return converted

    def load(value: Any) -> tuple[Any, ...]:
        _expect(value, list, "an array")
        return tuple(each(value, codec.load))

    def dump(value: Any) -> list[Any]:
        _expect(value, tuple, "a tuple")
        return each(value, codec.dump)

    return Codec(load, dump)


def _first_fault(convert: Load, values: Sequence[Any]) -> int:
    for index, value in enumerate(values):
        try:
            convert(value)
        except ProtocolError:
            return index
    return len(values)


def check_ascending(values: Iterable[Any], where: str = "") -> None:
    """Raise unless the values ascend strictly: so a set has one form."""
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise InconsistentError("not in strictly ascending order", where)


def free_map(most: int) -> Codec:
    """Make a codec for a map with unknown keys: parameters, and the ignorable `ext`."""

    def bounded(value: Any) -> Value:
        ordered = canonical.order(value, depth=_FREE_MAP_DEPTH)
        size = len(canonical.pack(ordered))
        if size > most:
            raise OutOfRangeError(f"{size} bytes, at most {most} are allowed")
        return ordered

    def load(value: Any) -> Mapping[str, Value]:
        _expect(value, dict, "a map")
        if value:
            bounded(value)
        return MappingProxyType(value)

    def dump(value: Any) -> Value:
        if not isinstance(value, Mapping):
            raise WrongTypeError(f"{show(value)} is not a map")
        return bounded(value) if value else {}

    return Codec(load, dump)


digest: Final[Codec] = blob(DIGEST_BYTES, DIGEST_BYTES)
key: Final[Codec] = plain(_key)
signature: Final[Codec] = blob(SIGNATURE_BYTES, SIGNATURE_BYTES)
counter: Final[Codec] = uint()
slug: Final[Codec] = pattern(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", 32, "a lower-case name")
engine_class: Final[Codec] = pattern(r"[a-z0-9]+/[a-z0-9_]+", 32, "an engine class such as torch/f32")
address: Final[Codec] = pattern(r"(/[A-Za-z0-9._:%-]+)+", limits.ADDRESS_BYTES, "a multiaddress")

Digest = Annotated[bytes, digest]
Key = Annotated[bytes, key]
Signature = Annotated[bytes, signature]
Counter = Annotated[int, counter]
Name = Annotated[str, text(limits.NAME_BYTES, 1)]
Slug = Annotated[str, slug]
EngineClass = Annotated[str, engine_class]
Ext = Annotated[Mapping[str, Any], free_map(limits.EXT_BYTES)]
