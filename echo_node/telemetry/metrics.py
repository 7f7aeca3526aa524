"""Step records, their in-memory list with writers, and a rate meter."""

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
from echo_node.telemetry.evaluations import Evaluation


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One group of a step: its id, sampler, slot, head, and the step of its policy."""

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
    """Id of the head that was published for it."""
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
    """Seconds since the run began on this node."""
    number: int = 0
    """Number of the batch; it also counts batches without an update, unlike `step`."""
    mask_share: float = 0.0
    """Share of tokens masked because the sampler's logprob is too far from the policy's."""
    veto_share: float = 0.0
    """Share of completions left out for the same reason."""
    kl: float = 0.0
    """KL divergence from the reference policy, where the run has one."""
    learning_rate: float = 0.0
    condemned_used: int = 0
    """Groups found dishonest after they had been used, so far."""
    waiting: int = 0
    """Groups in the replay buffer."""
    bytes_in: int = 0
    """Bytes of groups received since the step before."""
    bytes_out: int = 0
    """Bytes of the version that was published for it."""

    @property
    def by_sampler(self) -> Counter[bytes]:
        """Number of trained groups per sampler."""
        return Counter(group.sampler for group in self.groups)

    @property
    def staleness(self) -> Counter[int]:
        """Number of trained groups per age, in steps."""
        return Counter(self.policy_step - group.step for group in self.groups)

    def plain(self) -> dict[str, Any]:
        """Return the record for JSON: keys in hex, groups by their ids."""
        fields = dataclasses.asdict(self)
        fields["head"] = self.head.hex()
        fields["groups"] = [group.id.hex() for group in self.groups]
        fields["staleness"] = {str(age): count for age, count in sorted(self.staleness.items())}
        fields["by_sampler"] = {key.hex(): count for key, count in sorted(self.by_sampler.items())}
        return fields


class Writer(Protocol):
    """Sink of step records besides memory: a file, a database, a tracker."""

    def write(self, record: StepRecord) -> None:
        """Write one record, soon after its step."""

    def write_evaluation(self, found: Evaluation) -> None:
        """Write the evaluation of a version, which may be older than the last step."""

    def close(self) -> None:
        """Close the sink after the last record."""


class JsonLines:
    """Writer of JSON lines to a file that others may read meanwhile."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, f"writing to {self._file}"), self._file.open("a") as lines:
            lines.write(json.dumps(record.plain()) + "\n")

    def write_evaluation(self, found: Evaluation) -> None:
        with boundary(StoreError, f"writing to {self._file}"), self._file.open("a") as lines:
            lines.write(json.dumps({"evaluation": found.plain()}) + "\n")

    def close(self) -> None:
        """Do nothing: the file is closed between two lines."""


class Records:
    """Step records of a run, in memory and passed to its writers."""

    def __init__(self, file: Path | None = None, *, writers: Iterable[Writer] = ()) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        """Evaluations on held-out prompts, in the order in which they were made."""
        self._writers: list[Writer] = [*([JsonLines(file)] if file else ()), *writers]

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)
        for writer in self._writers:
            writer.write(record)

    def add_evaluation(self, found: Evaluation) -> None:
        self.evaluations.append(found)
        for writer in self._writers:
            writer.write_evaluation(found)

    def recall(self, earlier: Iterable[StepRecord]) -> None:
        """Add records of an earlier process that are not here yet."""
        known = {record.number for record in self.steps}
        self.steps += [record for record in earlier if record.number not in known]
        self.steps.sort(key=lambda record: record.number)

    @contextmanager
    def writing_to(self, writer: Writer) -> Generator[None]:
        """Add a writer for the duration of the block, then close it."""
        self._writers.append(writer)
        try:
            yield
        finally:
            self._writers.remove(writer)
            writer.close()

    def reward(self, last: int = 10) -> float:
        """Return the mean reward of the last few steps."""
        recent = [record.reward for record in self.steps[-last:]]
        return sum(recent) / len(recent) if recent else 0.0

    @property
    def max_staleness(self) -> int:
        """Largest age, in steps, of any trained group."""
        return max((age for record in self.steps for age in record.staleness), default=0)


class Rate:
    """Rate meter: amount per second over the last few seconds."""

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
