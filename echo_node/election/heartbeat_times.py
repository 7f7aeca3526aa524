"""Highest heartbeat time heard in each term, kept on disk over restarts.

A recorded heartbeat is still validly signed. A node that restarts and has forgotten which ones it
heard would take a recording for a living leader.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError
from echo_node.storage import files

log = logging.getLogger(__name__)
HEARTBEATS: Final = "heartbeats.json"
"""Name of the file in a node's folder of a run."""
TERMS: Final = 16
"""Newest terms whose times are kept."""
_MOST_BYTES: Final = 4_096
_NEVER: Final = -1


class HeartbeatTimes:
    """Highest time in milliseconds by term.

    Without a file they last as long as the process.

    Losing the file is not fatal: heartbeats far from the clock do not count anyway.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._times = {} if file is None else _read(file)

    def highest(self, term: int) -> int:
        """Return the highest time heard in a term, or -1."""
        return self._times.get(term, _NEVER)

    def heard(self, term: int, time_ms: int) -> None:
        """Record a heartbeat; write the file before it has any effect."""
        if time_ms <= self.highest(term):
            return
        kept = sorted({**self._times, term: time_ms}.items())[-TERMS:]
        self._times = dict(kept)
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(self._file, json.dumps(self._times).encode(), durable=False)
            except (OSError, StoreError) as error:  # a full disk must not silence the leader
                log.warning("the time of the last heartbeat was not written: %s", error)


def _read(file: Path) -> dict[int, int]:
    """Return the times of a file; none, if it is missing or damaged."""
    if not file.exists():
        return {}
    try:
        read = json.loads(files.read_whole(file, _MOST_BYTES))
        return {int(term): int(time_ms) for term, time_ms in read.items()}
    except (AttributeError, TypeError, ValueError, RecursionError, StoreError) as error:
        log.warning("%s is damaged and is written anew: %s", file.name, error)
        return {}
