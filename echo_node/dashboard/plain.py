"""A snapshot made fit for strangers' eyes: whatever text a peer chose is one printable line, whatever is no number is none.

The page puts text in as text; this is the second lock on the same door, and the one that files and scripts have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from echo_node.errors import LONGEST, one_line

DEEPEST: Final = 6
MOST_ENTRIES: Final = 4096
LARGEST: Final = 2**53
"""Above it a browser's numbers are no longer whole."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON takes it and a browser reads it: bounded, without control characters, without NaN."""
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
    """As `one_line`, and quick for the many that already are."""
    return text if len(text) <= LONGEST and text.isprintable() else one_line(text)
