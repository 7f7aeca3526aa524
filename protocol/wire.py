"""Frozen wire types, from canonical values and back.

A wire type is a class under `@record` (a map on the wire) or `@row` (an array); each field is
annotated with the codec of `protocol.fields` that bounds it. Rules between fields stand in the
type's `check`. A type that travels by itself says in `LIMIT` how many bytes it may take, and in
`ITEMS` how many items if they are many.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, dataclass_transform

from protocol import canonical, limits
from protocol.errors import MissingFieldError, ProtocolError, TooLargeError, UnknownFieldError, WrongTypeError
from protocol.fields import Codec, Load, show

T = TypeVar("T")


class Shape:
    """Codec of a wire type: exactly its fields, as a map or array; `check` last."""

    def __init__(self, cls: type) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        hints = _hints_of(cls, names)
        codecs = {name: _codec_of(hints[name], name) for name in names}
        self._cls = cls
        self._names = names
        self._name_set = frozenset(names)
        self._loads = [codecs[name].load for name in names]
        self._in_order = [(name, codecs[name].dump) for name in names]
        self._sorted = sorted(self._in_order, key=lambda pair: pair[0])
        self._sorted_names = sorted(names)
        self._check: Callable[[Any], None] | None = getattr(cls, "check", None)

    def load_map(self, value: Any) -> Any:
        if type(value) is not dict:
            raise WrongTypeError(f"{show(value)} is not a map")
        if value.keys() != self._name_set:
            for name in sorted(value.keys() - self._name_set):
                raise UnknownFieldError(f"unknown field {show(name)}")
            raise MissingFieldError("missing field", min(self._name_set - value.keys()))
        return self._build([value[name] for name in self._names])

    def load_row(self, value: Any) -> Any:
        if type(value) is not list:
            raise WrongTypeError(f"{show(value)} is not an array")
        if len(value) != len(self._names):
            raise WrongTypeError(f"an array of {len(value)}, not of {len(self._names)}")
        return self._build(value)

    def dump_map(self, message: Any) -> dict[str, Any]:
        return dict(zip(self._sorted_names, self._dumped(message, self._sorted), strict=True))

    def dump_row(self, message: Any) -> list[Any]:
        return self._dumped(message, self._in_order)

    def _build(self, values: Sequence[Any]) -> Any:
        try:
            built = self._cls(*[load(value) for load, value in zip(self._loads, values, strict=True)])
        except ProtocolError as error:
            self._locate(error, zip(self._names, self._loads, values, strict=True))
            raise
        if self._check:
            self._check(built)
        return built

    def _dumped(self, message: Any, dumps: list[tuple[str, Load]]) -> list[Any]:
        if type(message) is not self._cls:
            raise WrongTypeError(f"{type(message).__name__} is not {self._cls.__name__}")
        try:
            dumped = [dump(getattr(message, name)) for name, dump in dumps]
        except ProtocolError as error:
            self._locate(error, ((name, dump, getattr(message, name)) for name, dump in dumps))
            raise
        if self._check:
            self._check(message)
        return dumped

    @staticmethod
    def _locate(error: ProtocolError, fields: Iterable[tuple[str, Load, Any]]) -> None:
        """Name the field at fault. Only an error pays for this bookkeeping."""
        for name, convert, value in fields:
            try:
                convert(value)
            except ProtocolError:
                error.within(name)
                return


def _hints_of(cls: type, names: Iterable[str]) -> dict[str, Any]:
    """Return the annotations of fields.

    They are evaluated as one expression, which is quicker than many.
    """
    scope = sys.modules[cls.__module__].__dict__
    texts = [cls.__annotations__[name] for name in names]
    found = eval(f"({''.join(text + ', ' for text in texts)})", scope)  # noqa: S307 - our own source
    return dict(zip(names, found, strict=True))


def _codec_of(hint: Any, name: str) -> Codec:
    for metadata in getattr(hint, "__metadata__", ()):
        return metadata  # type: ignore[no-any-return]
    if hasattr(hint, "__wire__"):
        return of(hint)
    raise TypeError(f"field {name} has no codec")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a frozen wire type that is a map on the wire."""
    return _wire_type(cls, positional=False)


@dataclass_transform(frozen_default=True)
def row(cls: type[T]) -> type[T]:
    """Make a frozen wire type that is an array of its fields, in order, on the wire."""
    return _wire_type(cls, positional=True)


def _wire_type(cls: type[T], *, positional: bool) -> type[T]:
    # One function for all types: what dataclasses would write for each takes time at every start.
    cls.__repr__, cls.__eq__, cls.__hash__ = _repr, _equal, _hash  # type: ignore[method-assign, assignment]
    frozen = dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)(cls)
    shape = Shape(frozen)
    codec = Codec(shape.load_row, shape.dump_row) if positional else Codec(shape.load_map, shape.dump_map)
    frozen.__wire__ = codec  # type: ignore[attr-defined]
    return frozen


def _repr(message: Any) -> str:
    values = ", ".join(f"{name}={getattr(message, name)!r}" for name in message.__slots__)
    return f"{type(message).__qualname__}({values})"


def _values(message: Any) -> tuple[Any, ...]:
    return tuple([getattr(message, name) for name in message.__slots__])


def _equal(message: Any, other: Any) -> Any:
    return _values(message) == _values(other) if type(other) is type(message) else NotImplemented


def _hash(message: Any) -> int:
    return hash(_values(message))


def of(cls: type) -> Codec:
    """Return the codec of a wire type."""
    return cls.__wire__  # type: ignore[attr-defined, no-any-return]


def encode(message: object) -> bytes:
    """Encode a wire type in its one byte form."""
    cls: Any = type(message)
    packed = canonical.pack(of(cls).dump(message))
    if len(packed) > cls.LIMIT:
        raise TooLargeError(f"{len(packed)} bytes, at most {cls.LIMIT} are allowed")
    return packed


def decode(cls: type[T], data: bytes) -> T:
    """Decode a message, with every limit checked."""
    bounds: Any = cls
    value = canonical.decode(data, most=bounds.LIMIT, items=getattr(bounds, "ITEMS", limits.ITEMS))
    loaded: T = of(cls).load(value)
    return loaded
