"""Sanitise a snapshot for JSON: bounded, printable text, finite numbers.

The page also inserts text as text only; this protects programs that read the snapshot too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from echo_node.errors import LONGEST, one_line

DEEPEST: Final = 6
"""Levels of nesting; deeper values become "…"."""
MOST_ENTRIES: Final = 4096
"""Entries of one list or mapping."""
LARGEST: Final = 2**53
"""Largest integer that a browser's numbers hold exactly."""


def plain(value: Any, depth: int = 0) -> Any:
    """Return the value as bounded JSON without control characters or NaN."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        return "…" if depth >= DEEPEST else _several(value, depth)
    return line(str(value))


def _number(value: float) -> float | None:
    if isinstance(value, int):
        return value if -LARGEST <= value <= LARGEST else float(max(-1e300, min(1e300, value)))
    return value if math.isfinite(value) else None


def _several(value: Mapping[Any, Any] | Sequence[Any], depth: int) -> Any:
    if isinstance(value, Mapping):
        pairs = list(value.items())[:MOST_ENTRIES]
        return {line(str(name)): plain(inner, depth + 1) for name, inner in pairs}
    return [plain(inner, depth + 1) for inner in value[:MOST_ENTRIES]]


def line(text: str) -> str:
    """Return `one_line(text)`, quickly for text that already is one printable line."""
    return text if len(text) <= LONGEST and text.isprintable() else one_line(text)
