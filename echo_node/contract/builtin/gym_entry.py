"""An item of reasoning-gym as one text, and back without loss: tuples, keys that are numbers and fractions included.

So the process that scores needs nothing but the prompt. It is JSON and makes no objects but plain ones.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from echo_node.errors import ContractError


def entry_text(entry: dict[str, Any]) -> str:
    """The item as a text."""
    return json.dumps(_tagged(entry), separators=(",", ":"))


def entry_of(text: str) -> dict[str, Any]:
    """The item of a text that `entry_text` has made."""
    entry: dict[str, Any] = _plain(json.loads(text))
    return entry


def _tagged(value: Any) -> Any:
    """Lists are marked with what they stand for; everything else is what JSON has."""
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
