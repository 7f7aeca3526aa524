"""Start, command, measure and end the processes of the load benchmark.

A level is one rate for a while. A swarm has room for so many groups, since nothing leaves the
trainer's buffer; then a fresh one takes its place.
"""

from __future__ import annotations

import dataclasses
import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.load_run import BURST, ROOM

PROCESSES: Final = 2
SAMPLERS: Final = 8
"""Simulated ones, in all processes together."""
HEAD_START: Final = 0.5
"""Seconds from the order to the first burst, for every process to be ready."""
GRACE: Final = 20.0
"""Seconds within which the last receipts must come; a group without one is lost."""
DRAINED: Final = 1.0
"""Seconds after the last push within which a queue that did not grow has been answered."""
LATE: Final = 0.5
"""Seconds by which a burst may be late at a rate that is kept."""
ANSWER_SECONDS: Final = 120.0


@dataclasses.dataclass(frozen=True)
class Level:
    """Figures of one offered rate."""

    offered: float
    seconds: float
    pushed: int
    accepted: int
    in_time: int
    """Answered before the last burst's turn was over."""
    refused: dict[str, int]
    lost: int
    by_hand: int
    held_back: float
    drain: float
    overhead: float
    """Bytes in at the trainer over bytes of sealed groups."""
    body_overhead: float
    latencies: list[float]
    cpu: float
    """CPU time of the trainer, in cores."""
    jail_cpu: float
    cpu_ms: float
    """CPU time of the trainer and its jail per admitted group."""
    load_cpu: float
    """CPU time of all sampler processes, in cores."""
    spent: dict[str, float]
    flood: dict[str, Any]
    dropped: int
    """Messages that the trainer's inbox let go."""

    @property
    def rate(self) -> float:
        """Groups a second that were admitted and answered while they were offered."""
        return self.in_time / self.seconds

    @property
    def is_kept(self) -> bool:
        """Return whether nothing was lost or refused, and the queue did not grow."""
        whole = self.accepted == self.pushed and not self.lost and not self.refused
        return whole and self.held_back < LATE and self.drain < DRAINED

    def percentile(self, share: float) -> float:
        """Milliseconds from a push to its receipt."""
        ordered = sorted(self.latencies) or [math.nan]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.latencies) if self.latencies else math.nan


class Process:
    """A part of the swarm, which obeys lines of JSON."""

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(settings)]
        self._what = module
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def order(self, do: str, **what: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the process's next line. One line answers one order."""
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], ANSWER_SECONDS)
        line = self._child.stdout.readline() if ready else ""
        if not line:
            raise SystemExit(f"{self._what} sent no line; it ended with {self._child.poll()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.order(do, **what)
        return self.hear()

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class Swarm:
    """A trainer, simulated samplers, and one hostile peer that is quiet until ordered."""

    def __init__(self, trainer: Process, samplers: list[Process], hostile: Process, count: int) -> None:
        self._trainer = trainer
        self._samplers = samplers
        self._hostile = hostile
        self.samplers = count
        self.left = ROOM - ROOM // (count + 1)
        """Groups for which there is room; the hostile peer's share is not ours."""

    def level(self, rate: float, seconds: float, *, flood: bool = False, watch: bool = False) -> Level:
        """Offer so many groups a second for about so long, and see."""
        interval = BURST * self.samplers / rate
        bursts = max(1, round(seconds / interval))
        self.left -= bursts * BURST * self.samplers
        for each in self._samplers:
            each.order("prepare", bursts=bursts)
        for each in self._samplers:
            each.hear()
        if flood:
            self._hostile.ask("begin")
            time.sleep(1.0)  # until it is what the trainer sees
        before = self._trainer.ask("mark", watch=watch)
        start = time.monotonic() + HEAD_START
        for number, each in enumerate(self._samplers):
            phase = number / PROCESSES
            each.order("push", start=start, interval=interval, bursts=bursts, phase=phase, grace=GRACE)
        time.sleep(HEAD_START + bursts * interval)
        at_end = self._trainer.ask("mark", stop=True)
        answers = [each.hear() for each in self._samplers]
        after = self._trainer.ask("mark")
        flooded = self._hostile.ask("end") if flood else {}
        refused: Counter[str] = Counter()
        for answer in answers:
            refused.update(answer["refused"])
        payload = sum(answer["payload"] for answer in answers)
        spent = max(at_end["at"] - before["at"], 1e-9)
        return Level(
            offered=rate,
            seconds=bursts * interval,
            pushed=sum(answer["pushed"] for answer in answers),
            accepted=sum(answer["accepted"] for answer in answers),
            in_time=sum(answer["in_time"] for answer in answers),
            refused=dict(refused),
            lost=sum(answer["lost"] for answer in answers),
            by_hand=sum(answer["by_hand"] for answer in answers),
            held_back=max(answer["held_back"] for answer in answers),
            drain=max(answer["last_receipt"] - answer["pushed_at"] for answer in answers),
            overhead=(after["bytes_in"] - before["bytes_in"]) / payload,
            body_overhead=(after["bytes_in"] - before["bytes_in"])
            / sum(answer["body"] for answer in answers),
            latencies=[ms for answer in answers for ms in answer["latencies"]],
            cpu=(at_end["cpu"] - before["cpu"]) / spent,
            jail_cpu=(at_end["jail_cpu"] - before["jail_cpu"]) / spent,
            cpu_ms=1000
            * sum(after[part] - before[part] for part in ("cpu", "jail_cpu"))
            / max(sum(answer["accepted"] for answer in answers), 1),
            load_cpu=sum(answer["cpu"] for answer in answers) / spent,
            spent=at_end["spent"],
            flood=flooded,
            dropped=after["counts"].get("dropped", 0) - before["counts"].get("dropped", 0),
        )


@contextmanager
def start_swarm(count: int) -> Generator[Swarm]:
    """Start the swarm, and return once a head has all samplers in its roster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-load-")))

        def start(module: str, **settings: Any) -> Process:
            process = Process(module, settings)
            stack.callback(process.end)
            return process

        trainer = start("load_trainer", folder=str(folder), samplers=count + 1)
        seeds = trainer.hear()["addresses"]
        samplers = [
            start(
                "load_samplers", seeds=seeds, names=[f"sampler {n}" for n in range(first, count, PROCESSES)]
            )
            for first in range(PROCESSES)
        ]
        hostile = start("load_hostile", seeds=seeds, names=["hostile"])
        for each in (*samplers, hostile):
            each.hear()
            each.ask("join")
        hostile.ask("prepare")
        yield Swarm(trainer, samplers, hostile, count)
