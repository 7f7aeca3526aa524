"""Throughput monitor: time per engine call against time until staleness."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.8
"""Weight of the old value in the moving averages."""
ENOUGH: Final = 3
"""Calls, and steps, before a judgement is made."""


class ThroughputMonitor:
    """Moving averages of one sampler; `staleness` is the run's bound, in steps."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._calls = 0
        self._call_seconds = 0.0
        self._group_seconds = 0.0
        self._steps = 0
        self._step_seconds = 0.0
        self._last: tuple[int, float] | None = None

    def record_call(self, groups: int, seconds: float, longest: float | None = None) -> None:
        """Record an engine call: groups so far, seconds, and `longest` of one group."""
        longest = seconds if longest is None else longest
        self._call_seconds = _blend(self._call_seconds, longest, first=self._calls == 0)
        self._group_seconds = _blend(self._group_seconds, seconds / max(groups, 1), first=self._calls == 0)
        self._calls += 1

    def record_head(self, step: int, now: float) -> None:
        """Record the arrival of a head."""
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
        """Return advice if groups from this machine are stale when they are delivered."""
        if self._calls < ENOUGH or self._steps < ENOUGH:
            return None
        allowed = (self._staleness + 1) * self._step_seconds
        if self._call_seconds <= allowed:
            return None
        return (
            f"this machine is too slow for this run: a group takes {self._call_seconds:.1f} s, and"
            f" is stale after {allowed:.1f} s"
            f" ({self._staleness + 1} steps of {self._step_seconds:.1f} s); "
            f"{'fewer --slots may help, or another run' if self._staleness else 'another run may suit it better'}"
        )


def _blend(known: float, new: float, *, first: bool) -> float:
    return new if first else _MEMORY * known + (1 - _MEMORY) * new
