"""Lossless JSON of a reasoning-gym item: tuples, number keys and fractions too.

So the scoring process needs nothing but the prompt. Decoding makes plain objects only.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from echo_node.errors import ContractError


def entry_text(entry: dict[str, Any]) -> str:
    """Return the item as JSON text."""
    return json.dumps(_tagged(entry), separators=(",", ":"))


def entry_of(text: str) -> dict[str, Any]:
    """Return the item in a text that `entry_text` made."""
    entry: dict[str, Any] = _plain(json.loads(text))
    return entry


def _tagged(value: Any) -> Any:
    """Return the value for JSON, with lists tagged by what they stand for."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict):
        return ["dict", *([_tagged(key), _tagged(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *map(_tagged, value)]
    if isinstance(value, Fraction):
        return ["fraction", value.numerator, value.denominator]
    raise ContractError(f"an item of reasoning-gym holds a {type(value).__name__}, which has no text")


def _plain(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "dict":
        return {_plain(key): _plain(item) for key, item in items}
    if kind == "fraction":
        return Fraction(*items)
    return list(map(_plain, items)) if kind == "list" else tuple(map(_plain, items))
