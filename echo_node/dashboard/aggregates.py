"""Totals over a node's life: bytes, tokens, group ages, recent speed.

Speed is that of the last minutes. The snapshot that they are read from keeps only the last steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import trio

from echo_node.telemetry.snapshot import Snapshot

LOOK_SECONDS: Final = 0.5
"""Shortest time, in seconds, between two readings of the snapshot."""
MOMENT_SECONDS: Final = 2.0
"""Seconds between two moments."""
MOST_MOMENTS: Final = 900
"""Moments that are kept: half an hour."""
OLDEST: Final = 64
"""Largest age in steps; older groups are counted with it."""


class Moment(NamedTuple):
    """Speed and progress at one time, as far as the role has them."""

    at: float
    tokens_per_second: float | None
    counted: int | None
    """A sampler's accepted groups, or a verifier's honest ones."""


class Aggregates:
    """Totals over every step in the snapshot; they grow while `follow` runs."""

    def __init__(self, board: Snapshot) -> None:
        self._board = board
        self._last: Mapping[str, Any] | None = None
        self.steps = 0
        self.versions = 0
        """Published versions: steps that sent bytes."""
        self.groups = 0
        self.tokens = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.ages: Counter[int] = Counter()
        self.moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)

    async def follow(self) -> None:
        """Update at each change of the snapshot, at a bounded rate, until cancelled."""
        while True:
            seen = self._board.sequence
            self.look()
            await trio.sleep(LOOK_SECONDS)
            with trio.move_on_after(MOMENT_SECONDS):  # the speed changes without news too
                await self._board.wait_for_news(seen)

    def look(self) -> None:
        """Add what is new in the snapshot."""
        snapshot = self._board.snapshot(lines=0)
        for step in newer(snapshot["steps"], self._last):
            self._add(step)
        if snapshot["steps"]:
            self._last = snapshot["steps"][-1]
        self._note(snapshot["at"], snapshot["progress"])

    def to_json(self) -> dict[str, Any]:
        """Return the totals for the page."""
        return {
            "steps": self.steps,
            "versions": self.versions,
            "groups": self.groups,
            "tokens": self.tokens,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "staleness": {str(age): count for age, count in sorted(self.ages.items())},
        }

    def _note(self, at: float, progress: Mapping[str, Any]) -> None:
        if self.moments and at - self.moments[-1].at < MOMENT_SECONDS:
            return
        speed, counted = progress.get("tokens_per_second"), progress.get("accepted")
        if isinstance(verdicts := progress.get("verdicts"), Mapping):
            counted = verdicts.get("honest", 0)
        if isinstance(speed, int | float) or isinstance(counted, int):
            known = float(speed) if isinstance(speed, int | float) else None
            self.moments.append(Moment(at, known, counted if isinstance(counted, int) else None))

    def _add(self, step: Mapping[str, Any]) -> None:
        self.steps += 1
        self.tokens += _whole(step.get("tokens"))
        self.bytes_in += _whole(step.get("bytes_in"))
        self.bytes_out += _whole(step.get("bytes_out"))
        self.versions += _whole(step.get("bytes_out")) > 0
        for age, count in dict(step.get("staleness") or {}).items():
            if str(age).isdecimal():
                self.ages[min(int(age), OLDEST)] += _whole(count)
                self.groups += _whole(count)


def newer(rows: Sequence[Mapping[str, Any]], last: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the rows after `last`, or all if it is not among them."""
    if last is None:
        return rows
    for index in range(len(rows) - 1, -1, -1):
        if rows[index] == last:
            return rows[index + 1 :]
    return rows


def _whole(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0
