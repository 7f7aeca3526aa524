"""What a node has said of itself, for whoever looks: the newest of what changes, and the last of what piles up.

A node tells its events here; `echo-node status`, the page and the metrics read the same snapshot. It is plain data, bounded,
and knows neither how the events came about nor who looks at them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import trio

from echo_node import __version__

FORMAT: Final = 1
"""Of a snapshot. A reader of another one says so, and does not guess."""
MOST_STEPS: Final = 2000
MOST_LINES: Final = 500
Phase: TypeAlias = Literal["starting", "working", "paused", "stopping"]
_PHASES: Final[Mapping[str, Phase]] = {
    "seeking": "starting",
    "found": "working",
    "paused": "paused",
    "resumed": "working",
    "stopped": "stopping",
}
"""What follows from an event alone."""


class Board:
    """One node's news. `sequence` rises with each."""

    def __init__(self) -> None:
        self.sequence = 0
        self._phase: Phase = "starting"
        self._node: dict[str, Any] = {"pid": os.getpid(), "began": round(time.time(), 3)}
        self._run: dict[str, Any] | None = None
        self._addresses: list[str] = []
        self._reach = ""
        self._progress: dict[str, Any] = {}
        self._peers: list[dict[str, Any]] = []
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self._log: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)
        self._news = trio.Event()

    def hear(self, event: str, words: str, told: Mapping[str, Any]) -> None:
        """An event of this node, in words for people and in figures for programs."""
        at = round(time.time(), 3)
        match event:
            case "started":
                known = ("role", "peer_id", "state")
                self._node |= {name: told[name] for name in known if name in told}
            case "listening":
                self._addresses = list(told["addresses"])
                if self._phase != "paused":  # on battery, before anybody was met
                    self._phase = "working"
            case "progress":
                self._progress = dict(told)
            case "step":
                self._steps.append({"at": at, **told})
            case _:
                pass
        self._phase = _PHASES.get(event, self._phase)
        if words and event not in {"progress", "step"}:
            self._log.append({"at": at, "event": event, "words": words})
        self._tell()

    def describe_run(self, run: Mapping[str, Any]) -> None:
        """Which run this node is in: its id, its name, and the numbers that people ask about."""
        self._run = dict(run)
        self._tell()

    def describe_swarm(self, peers: Sequence[Mapping[str, Any]], reach: str) -> None:
        """Whom this node knows of the run, and whether others can reach it."""
        found = [dict(peer) for peer in peers]
        if (found, reach) != (self._peers, self._reach):
            self._peers, self._reach = found, reach
            self._tell()

    def snapshot(self, *, steps: int = MOST_STEPS, lines: int = MOST_LINES) -> dict[str, Any]:
        """Everything, with so many of the newest steps and lines. It is a copy, and JSON takes it."""
        return {
            "format": FORMAT,
            "program": f"echo-node {__version__}",
            "sequence": self.sequence,
            "at": round(time.time(), 3),
            "phase": self._phase,
            "node": dict(self._node),
            "run": dict(self._run) if self._run else None,
            "addresses": list(self._addresses),
            "reach": self._reach,
            "progress": dict(self._progress),
            "peers": [dict(peer) for peer in self._peers],
            "steps": list(self._steps)[-steps:] if steps else [],
            "log": list(self._log)[-lines:] if lines else [],
        }

    async def wait_for_news(self, since: int) -> None:
        """Until something is newer than this sequence number. The caller sets the deadline."""
        while self.sequence <= since:
            await self._news.wait()

    def _tell(self) -> None:
        self.sequence += 1
        self._news.set()
        self._news = trio.Event()
