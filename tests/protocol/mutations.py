"""Faulty variants of an honest value, each with one fault and a name: what every decoder must
refuse.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

from protocol import canonical, limits
from protocol.wire import of

NAN, INFINITY, MINUS_ZERO = (struct.pack(">d", number) for number in (float("nan"), float("inf"), -0.0))


def tree_of(message: object) -> Any:
    """The canonical value of a wire type, as plain dicts and lists that may be changed."""
    return canonical.decode(
        canonical.pack(of(type(message)).dump(message)), most=limits.LAYOUT_BYTES, items=limits.MANY_ITEMS
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a value with what stands there. Of an array only the first item, as the others
    are alike.
    """
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a value with one place changed."""
    if not path:
        return change(value)
    first, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {key: changed(inner, rest, change) if key == first else inner for key, inner in value.items()}
    return [changed(inner, rest, change) if index == first else inner for index, inner in enumerate(value)]


def spell(path: tuple[Any, ...]) -> str:
    return (
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        or "message"
    )


def ignorable(path: tuple[Any, ...]) -> bool:
    """Whether a place lies within a map of free content, where nothing is wrong."""
    free = {"ext", "params", "variables"}
    return any(part in free for part in path[:-1])


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    data: bytes
    error: str


def structural(message: object) -> Iterator[Mutation]:
    """A field too many, too few or of another type, wherever a field is; and numbers that are
    none.
    """
    tree = tree_of(message)
    for path, value in places(tree):
        if ignorable(path):
            continue
        where = spell(path)
        stranger: Any = "a string" if not isinstance(value, str) else 7
        if path:
            yield Mutation(
                f"wrong type at {where}",
                _pack(changed(tree, path, lambda _, stranger=stranger: stranger)),
                "wrong-type",
            )
        if isinstance(value, dict) and path[-1:] not in {("ext",), ("params",), ("variables",)}:
            more = changed(tree, path, lambda was: {**was, "zzz": None})
            yield Mutation(f"unknown field in {where}", _pack(more), "unknown-field")
            for key in value:
                fewer = changed(tree, path, lambda was, key=key: {k: v for k, v in was.items() if k != key})
                yield Mutation(f"missing field {key} in {where}", _pack(fewer), "missing-field")
        if isinstance(value, float):
            marked = _pack(changed(tree, path, lambda _: 0.123456789))
            mark = struct.pack(">d", 0.123456789)
            for label, bits, error in (
                ("NaN", NAN, "not-finite"),
                ("infinity", INFINITY, "not-finite"),
                ("minus zero", MINUS_ZERO, "not-canonical"),
            ):
                yield Mutation(f"{label} at {where}", marked.replace(mark, bits), error)
            whole = _pack(changed(tree, path, lambda _: 1))
            yield Mutation(f"an integer for a float at {where}", whole, "wrong-type")


def malformed(message: object) -> Iterator[Mutation]:
    """Bytes that are not one canonical value."""
    data = _pack(tree_of(message))
    yield Mutation("cut short", data[:-1], "truncated")
    yield Mutation("one byte more", data + b"\xc0", "trailing-bytes")
    yield Mutation("nothing at all", b"", "truncated")
    yield Mutation("not a map", b"\xc0", "wrong-type")


def _pack(value: Any) -> bytes:
    return canonical.pack(canonical.order(value, items=limits.MANY_ITEMS))
