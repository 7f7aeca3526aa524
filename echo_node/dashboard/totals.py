"""What adds up over a node's life, though the board keeps only the last of it: bytes, tokens, ages of groups, and the speed
of the last minutes. It reads the board and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import trio

from echo_node.board import Board

LOOK_SECONDS: Final = 0.5
"""Between two looks at the board, however fast its news comes."""
MOMENT_SECONDS: Final = 2.0
MOST_MOMENTS: Final = 900
"""Half an hour of them."""
OLDEST: Final = 64
"""Steps. Whatever claims to be older is counted with these."""


class Moment(NamedTuple):
    """How it went at one time: as far as this role knows."""

    at: float
    tokens_per_second: float | None
    counted: int | None
    """Groups that were accepted of a sampler, or found honest by a verifier."""


class Totals:
    """Sums over every step that was seen. `follow` must run for them to grow."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last: Mapping[str, Any] | None = None
        self.steps = 0
        self.versions = 0
        """Those that were published: steps that sent something out."""
        self.groups = 0
        self.tokens = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.ages: Counter[int] = Counter()
        self.moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)

    async def follow(self) -> None:
        """Look whenever there is news, and not more often than needed, until cancelled."""
        while True:
            seen = self._board.sequence
            self.look()
            await trio.sleep(LOOK_SECONDS)
            with trio.move_on_after(MOMENT_SECONDS):  # a node without news has a speed too
                await self._board.wait_for_news(seen)

    def look(self) -> None:
        """Take in what is new on the board."""
        told = self._board.snapshot(lines=0)
        for step in newer(told["steps"], self._last):
            self._add(step)
        if told["steps"]:
            self._last = told["steps"][-1]
        self._note(told["at"], told["progress"])

    def told(self) -> dict[str, Any]:
        """The sums, as the page has them."""
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
    """The rows after this one; all of them where it is gone."""
    if last is None:
        return rows
    for index in range(len(rows) - 1, -1, -1):
        if rows[index] == last:
            return rows[index + 1 :]
    return rows


def _whole(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0
