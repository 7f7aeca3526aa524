"""What a run records of each step, and how fast it goes. Plain data: views, files and tests read the same records."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

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
    number: int = 0
    """Of the batch: steps that taught nothing do not move the policy on, and are counted here."""
    mask_share: float = 0.0
    """Of the tokens, those that were masked out for how far the sampler's claim is from the policy."""
    veto_share: float = 0.0
    """Of the completions, those that were left out for the same."""
    kl: float = 0.0
    """The divergence from the reference policy, where the run has one."""
    learning_rate: float = 0.0
    condemned_used: int = 0
    """Groups that were found dishonest after they had been used, so far."""
    waiting: int = 0
    """Groups in the replay buffer."""
    bytes_in: int = 0
    """Of groups that came since the step before."""
    bytes_out: int = 0
    """Of the version that was published for it."""

    @property
    def by_sampler(self) -> Counter[bytes]:
        """How many groups of each sampler were trained on."""
        return Counter(group.sampler for group in self.groups)

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
        told["by_sampler"] = {key.hex(): count for key, count in sorted(self.by_sampler.items())}
        return told


class Writer(Protocol):
    """Where records go besides memory: a file, a database, somebody's web page."""

    def write(self, record: StepRecord) -> None:
        """Take one record, soon after its step."""

    def close(self) -> None:
        """No more will come."""


class Lines:
    """Records as lines of JSON, in a file that others may read meanwhile."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, f"writing to {self._file}"), self._file.open("a") as lines:
            lines.write(json.dumps(record.plain()) + "\n")

    def close(self) -> None:
        """Nothing is open between two lines."""


class Records:
    """The steps of a run, in memory and wherever else its writers put them; a file gets lines of JSON."""

    def __init__(self, file: Path | None = None, *, writers: Iterable[Writer] = ()) -> None:
        self.steps: list[StepRecord] = []
        self._writers: list[Writer] = [*([Lines(file)] if file else ()), *writers]

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)
        for writer in self._writers:
            writer.write(record)

    def recall(self, earlier: Iterable[StepRecord]) -> None:
        """Have steps of an earlier process as well, those that are not here."""
        known = {record.number for record in self.steps}
        self.steps += [record for record in earlier if record.number not in known]
        self.steps.sort(key=lambda record: record.number)

    @contextmanager
    def writing_to(self, writer: Writer) -> Generator[None]:
        """Put records there too for as long as the block lasts, and close it."""
        self._writers.append(writer)
        try:
            yield
        finally:
            self._writers.remove(writer)
            writer.close()

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
