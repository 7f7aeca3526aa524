"""Whether this machine keeps up with its run: how long a call of the engine takes, against how soon what it makes is stale.

It is arithmetic on times that it is told, and knows neither engine nor run.
"""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.8
"""How much of what was known goes into the next figure."""
ENOUGH: Final = 3
"""Calls, and steps, before anything is said."""


class KeepingUp:
    """One sampler's. `staleness` is how many steps old a group may be when it is learnt from."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._calls = 0
        self._call_seconds = 0.0
        self._group_seconds = 0.0
        self._steps = 0
        self._step_seconds = 0.0
        self._last: tuple[int, float] | None = None

    def called(self, groups: int, seconds: float) -> None:
        """A call has made so many groups in so long."""
        self._call_seconds = _blend(self._call_seconds, seconds, first=self._calls == 0)
        self._group_seconds = _blend(self._group_seconds, seconds / max(groups, 1), first=self._calls == 0)
        self._calls += 1

    def heard(self, step: int, now: float) -> None:
        """A head of this step has come."""
        if self._last is not None and step > self._last[0]:
            passed = (now - self._last[1]) / (step - self._last[0])
            self._step_seconds = _blend(self._step_seconds, passed, first=self._steps == 0)
            self._steps += 1
        if self._last is None or step > self._last[0]:
            self._last = (step, now)

    @property
    def seconds_per_group(self) -> float | None:
        return self._group_seconds if self._calls else None

    @property
    def too_slow(self) -> str | None:
        """What to tell the person, if what is made here is stale before it arrives."""
        if self._calls < ENOUGH or self._steps < ENOUGH:
            return None
        allowed = (self._staleness + 1) * self._step_seconds
        if self._call_seconds <= allowed:
            return None
        return (
            f"this machine is too slow for this run: a call takes {self._call_seconds:.1f} s, and what it makes counts for "
            f"{allowed:.1f} s ({self._staleness + 1} steps of {self._step_seconds:.1f} s); "
            f"{'fewer --slots may help, or another run' if self._staleness else 'another run may suit it better'}"
        )


def _blend(known: float, new: float, *, first: bool) -> float:
    return new if first else _MEMORY * known + (1 - _MEMORY) * new
