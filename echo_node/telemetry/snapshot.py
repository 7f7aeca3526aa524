"""Bounded state of a node for viewers: newest status, last steps and log lines.

Fed by the node's events; read by `echo-node status`, the dashboard and the Prometheus metrics.
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
"""Version of the snapshot's fields; a reader refuses another one."""
MOST_STEPS: Final = 2000
"""Step events that are kept."""
MOST_LINES: Final = 500
"""Log lines that are kept."""
Phase: TypeAlias = Literal["starting", "working", "paused", "stopping"]
_PHASES: Final[Mapping[str, Phase]] = {
    "seeking": "starting",
    "found": "working",
    "paused": "paused",
    "resumed": "working",
    "stopped": "stopping",
}
"""Phases that follow from an event alone."""


class Snapshot:
    """State of one node; `sequence` rises with each change."""

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

    def record(self, event: str, words: str, figures: Mapping[str, Any]) -> None:
        """Record an event, with its text for people and its figures for programs."""
        at = round(time.time(), 3)
        match event:
            case "started":
                known = ("role", "peer_id", "state")
                self._node |= {name: figures[name] for name in known if name in figures}
            case "listening":
                self._addresses = list(figures["addresses"])
                if self._phase != "paused":  # by the battery, before any peer was met
                    self._phase = "working"
            case "progress":
                self._progress = dict(figures)
            case "step":
                self._steps.append({"at": at, **figures})
            case _:
                pass
        self._phase = _PHASES.get(event, self._phase)
        if words and event not in {"progress", "step"}:
            self._log.append({"at": at, "event": event, "words": words})
        self._notify()

    def describe_run(self, run: Mapping[str, Any]) -> None:
        """Set the run that this node is in: its id, name and main figures."""
        self._run = dict(run)
        self._notify()

    def describe_swarm(self, peers: Sequence[Mapping[str, Any]], reach: str) -> None:
        """Set the known peers of the run, and the reachability of this node."""
        found = [dict(peer) for peer in peers]
        if (found, reach) != (self._peers, self._reach):
            self._peers, self._reach = found, reach
            self._notify()

    def snapshot(self, *, steps: int = MOST_STEPS, lines: int = MOST_LINES) -> dict[str, Any]:
        """Return a copy for JSON, with at most this many of the newest steps and lines."""
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
        """Wait for a change after this sequence number; the caller sets the deadline."""
        while self.sequence <= since:
            await self._news.wait()

    def _notify(self) -> None:
        self.sequence += 1
        self._news.set()
        self._news = trio.Event()
