"""The timeline of a chaos run: a line for people on the terminal, a line of JSON in the file.

Times are seconds since the run began, by the clock that never jumps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], object]


class Timeline:
    """One run's. `say` takes the lines for people."""

    def __init__(self, file: Path, say: Say) -> None:
        self._began = time.monotonic()
        self._file = file.open("a", encoding="utf-8")
        self._say = say

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return round(time.monotonic() - self._began, 3)

    def note(self, what: str, node: str | None = None, /, **details: Any) -> None:
        """Something happened, just now."""
        at = self.now
        self._file.write(json.dumps({"at": at, "what": what, "node": node, **details}) + "\n")
        self._file.flush()
        rest = " ".join(f"{name}={_plain(value)}" for name, value in details.items())
        self._say(f"{at:8.1f}  {what:<9} {node or '-':<10} {rest}".rstrip())

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
