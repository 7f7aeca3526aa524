"""What a run records of each step, and how fast it goes. Plain data: views, files and tests read the same records."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from echo_node.errors import StoreError, boundary


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One group of a step: which it was, who sampled it, and at which step its policy was."""

    id: bytes
    sampler: bytes
    slot: int
    head: bytes
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimiser step, from the policy at `policy_step` to the one at `step`."""

    step: int
    policy_step: int
    version: int
    head: bytes
    """The id of the head that was published for it."""
    reward: float
    spread: float
    loss: float
    entropy: float
    clip_share: float
    mismatch_kl: float
    effective_sample_share: float
    gradient_norm: float
    tokens: int
    groups: tuple[TrainedGroup, ...]
    dropped: dict[str, int]
    waited_seconds: float
    step_seconds: float
    at_seconds: float
    """Since the run began on this node."""

    @property
    def staleness(self) -> Counter[int]:
        """How many groups were how many steps old when they were trained on."""
        return Counter(self.policy_step - group.step for group in self.groups)

    def plain(self) -> dict[str, Any]:
        """For a line of JSON: no bytes, groups by their ids."""
        told = dataclasses.asdict(self)
        told["head"] = self.head.hex()
        told["groups"] = [group.id.hex() for group in self.groups]
        told["staleness"] = {str(age): count for age, count in sorted(self.staleness.items())}
        return told


class Records:
    """The steps of a run, in memory and, where a file is given, as JSON lines."""

    def __init__(self, file: Path | None = None) -> None:
        self.steps: list[StepRecord] = []
        self._file = file

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)
        if self._file:
            with boundary(StoreError, f"writing to {self._file}"), self._file.open("a") as lines:
                lines.write(json.dumps(record.plain()) + "\n")

    def reward(self, last: int = 10) -> float:
        """The mean reward of the last few steps."""
        recent = [record.reward for record in self.steps[-last:]]
        return sum(recent) / len(recent) if recent else 0.0

    @property
    def max_staleness(self) -> int:
        """The age of the oldest group that was ever trained on."""
        return max((age for record in self.steps for age in record.staleness), default=0)


class Rate:
    """So many a second, over the last few seconds."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._events: deque[tuple[float, float]] = deque(maxlen=4096)

    def add(self, amount: float) -> None:
        self._events.append((time.monotonic(), amount))

    def per_second(self) -> float:
        now = time.monotonic()
        while self._events and now - self._events[0][0] > self._seconds:
            self._events.popleft()
        if not self._events:
            return 0.0
        return sum(amount for _, amount in self._events) / max(now - self._events[0][0], 0.25)
