"""Read the type definitions of SPEC.md, and tell for each field what is just within its bounds and
what just beyond.

The definitions are the code blocks whose lines begin with `record` or `row`. So the limits that the
tests try are those of the document, not those of the code.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from protocol import Identity

SPEC = Path(__file__).parents[2] / "SPEC.md"

NAMED = {
    "digest": "bytes 32..32",
    "signature": "bytes 64..64",
    "slug": "match /[a-z][a-z0-9]*(-[a-z0-9]+)*/ ..32",
    "engine": "match /[a-z0-9]+\\/[a-z0-9_]+/ ..32",
    "address": "match /(\\/[A-Za-z0-9._:%-]+)+/ ..256",
    "version": "match /[0-9A-Za-z.+-]+/ ..32",
}
LONGEST = {"slug": "a" * 32, "engine": "a/" + "b" * 30, "address": "/" + "a" * 255, "version": "1" * 32}
_TRY_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Definition:
    name: str
    row: bool
    kind: str | None
    limit: int | None
    items: int | None
    fields: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Values just within a type's bounds, and just beyond, in canonical form."""

    within: list[Any]
    beyond: list[Any]


def definitions() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for block in re.findall(r"^```\n(.*?)^```", SPEC.read_text(), re.MULTILINE | re.DOTALL):
        for paragraph in block.strip().split("\n\n"):
            head, *lines = paragraph.splitlines()
            if not (match := re.match(r"(record|row) (\w+)", head)):
                continue
            options = dict(re.findall(r"(kind|max|items) (\S+)", head))
            # type: ignore[union-attr]
            fields = dict(re.match(r"  (\w+)\s+(.+)", line).groups() for line in lines)
            found[match[2]] = Definition(
                match[2],
                match[1] == "row",
                options.get("kind"),
                int(options["max"]) if "max" in options else None,
                int(options["items"]) if "items" in options else None,
                fields,
            )
    return found


def edges(notation: str) -> Edges:
    """What to try for a field. Records within a field are tried by themselves."""
    if notation.endswith(" ?"):
        inner = edges(notation.removesuffix(" ?"))
        return Edges([None, *inner.within], inner.beyond)
    if notation in LONGEST:
        longest = LONGEST[notation]
        return Edges(
            [longest, longest[:3]], [longest + "a", "", longest[:3].upper() + "ß", longest[:3] + "\n"]
        )
    if notation == "key":
        return Edges([Identity(bytes(32)).public], [])
    if match := re.fullmatch(r"match /(.+)/ \.\.(\d+)", notation):
        most = int(match[2])
        return Edges(["a", "a" * most], ["", "a" * (most + 1), "../../x", "a b", "a\n"])
    if notation == "bool":
        return Edges([True, False], [])
    if match := re.fullmatch(r"map (\d+)", notation):
        most = int(match[1])
        return Edges([{}, {"k": b"x" * (most - 6)}], [{"k": b"x" * (most - 5)}])
    if re.fullmatch(r'"\w+"( \| "\w+")+', notation):
        return Edges(re.findall(r'"(\w+)"', notation), ["", "other", notation.split('"')[1].upper()])
    if match := re.fullmatch(r"\[(.+)\] (\d+)\.\.(\d+)( ascending)?", notation):
        return _array_edges(match[1], int(match[2]), int(match[3]), ascending=bool(match[4]))
    notation = NAMED.get(notation, notation)
    if match := re.fullmatch(r"(uint|float|text|bytes) (-?[\d.]+?)\.\.(-?[\d.]+)( step (\d+))?", notation):
        return _range_edges(match[1], match[2], match[3], int(match[5] or 1))
    return Edges([], [])


def _range_edges(kind: str, low: str, high: str, step: int) -> Edges:
    if kind == "uint":
        least, most = int(low), int(high)
        return Edges([least, most], [least - 1, most + 1])
    if kind == "float":
        a, b = float(low), float(high)
        return Edges([a, b], [a - max(1e-9, abs(a) * 1e-9), b + max(1e-9, abs(b) * 1e-9), -1e300, 1e300])
    least, most = int(low), int(high)
    lengths = [least, most] if most <= _TRY_BYTES else [least]
    beyond = [length for length in (least - step, most + step) if 0 <= length <= _TRY_BYTES + step]
    beyond += [least + 1] if step > 1 else []
    make = (lambda n: "x" * n) if kind == "text" else bytes
    extra = ["a\nb", "\x1b[2J", "\u202e", "x" * (most - 1) + "é"] if kind == "text" else []
    return Edges([make(n) for n in lengths], [make(n) for n in beyond] + extra)


def _array_edges(item: str, least: int, most: int, *, ascending: bool) -> Edges:
    inner = edges(item)
    if not inner.within:
        return Edges([], [])
    sample = inner.within[0 if item.startswith("[") else -1]  # many of many are too many items
    if ascending:
        return Edges([[sample]] if least <= 1 else [], [[]] if least else [])
    return Edges(
        [[sample] * least, [sample] * most],
        [
            [sample] * (most + 1),
            *([[sample] * (least - 1)] if least else []),
            *([bad] for bad in inner.beyond),
        ],
    )


def located(name: str, tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    """Every field of a record's canonical value, with its path and notation; of arrays, the first
    item's.
    """
    known = definitions()
    found: list[tuple[tuple[Any, ...], str]] = []
    for index, (field, notation) in enumerate(known[name].fields.items()):
        key = index if known[name].row else field
        inner = tree[key]
        found.append(((*path, key), notation))
        nested = re.match(r"\[\[(\w+)\]", notation)
        listed = re.match(r"\[(\w+)\]", notation)
        if nested and nested[1] in known:  # of the first inner array that holds any
            place = next((at for at, items in enumerate(inner) if items), None)
            if place is not None:
                found += located(nested[1], inner[place][0], (*path, key, place, 0))
        elif listed and listed[1] in known and inner:
            found += located(listed[1], inner[0], (*path, key, 0))
        elif (plain := notation.removesuffix(" ?")) in known and inner is not None:
            found += located(plain, inner, (*path, key))
    return found
