"""Step time against TRL's, and async against sequential over a slow swarm.

Steps are timed in one process and one thread, a few of TRL's and a few of ours turn by turn. The
swarms have engines in processes of their own, the best that this machine has, and each call of an
engine waits for the same fixed time, without using the processor, in both modes; the mail is not
slow here. Nothing is evaluated while a clock runs. A busy machine makes these numbers worthless.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
import trio

from benchmarks.convergence_ours import CoLocated
from benchmarks.convergence_task import GROUP, identity, luck, open_run
from benchmarks.convergence_trl import Weights, trl_trainer
from echo_node.engine.base import (
    Engine,
    Finished,
    Respond,
    SlotRequest,
    Update,
    never,
    no_environment,
    no_news,
)
from echo_node.engine.engine_classes import EngineSpec, best_class
from echo_node.engine.worker.client import WorkerEngine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import ENGINES
from echo_node.telemetry.metrics import Records

STEPS_A_TURN = 8
WARM_STEPS = 5
SETTLING_STEPS = 12
"""Warm-up steps of a swarm: at first samplers have no rate, and much goes stale."""
VOLUNTEERS = 8
SLOTS_PER_CALL = 8
"""Slots of one engine call in asynchronous mode; on request, a share of the batch."""
DELAY_SECONDS = 0.2
STALENESS = 4


def step_pairs(turns: int, say: Callable[[str], None]) -> list[tuple[float, float]]:
    """Seconds of a step, ours and TRL's, for each turn. In every other turn ours goes first."""
    torch.set_num_threads(1)
    ours = CoLocated(seed=0)
    for _ in range(WARM_STEPS):
        ours.step()
    mine: list[float] = []
    theirs: list[float] = []
    began = 0.0

    def our_turn() -> None:
        start = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            ours.step()
        mine.append((time.perf_counter() - start) / STEPS_A_TURN)

    def after_step(step: int, _weights: Weights) -> None:
        nonlocal began
        done, rest = divmod(step - WARM_STEPS, STEPS_A_TURN)
        if rest or done < 0:
            return
        if done:
            theirs.append((time.perf_counter() - began) / STEPS_A_TURN)
            say(f"steps: turn {done} of {turns}")
        if done % 2:
            for _ in range(min(2, turns - len(mine))):
                our_turn()
        began = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl_trainer(ours.run, 0, WARM_STEPS + turns * STEPS_A_TURN, folder, after_step).train()
    return list(zip(mine, theirs, strict=True))


class SlowEngine:
    """An engine whose every call begins with a wait."""

    def __init__(self, inner: Engine, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        time.sleep(self._seconds)
        yield from self._inner.generate(requests, stop=stop, news=news, respond=respond)


def swarm_pairs(turns: int, steps: int, say: Callable[[str], None]) -> list[tuple[Records, Records]]:
    """Return records of an async and a sequential run per turn, alternating the order."""
    torch.set_num_threads(1)
    best = best_class({each.engine for each in ENGINES})
    spec = EngineSpec(best, embedded.folder(), device="cpu", rows=SLOTS_PER_CALL * GROUP, threads=1)
    workers = [WorkerEngine(spec) for _ in range(VOLUNTEERS)]
    try:
        for worker in workers:
            worker.start()
        engines: list[Engine] = [SlowEngine(worker, DELAY_SECONDS) for worker in workers]
        pairs = []
        for turn in range(turns):
            found: dict[int | None, Records] = {}
            for staleness in (None, STALENESS) if turn % 2 else (STALENESS, None):
                say(f"swarms: turn {turn + 1} of {turns}, {'sequential' if staleness is None else 'async'}")
                found[staleness] = trio.run(_play, turn, steps, staleness, engines)
            pairs.append((found[STALENESS], found[None]))
        return pairs
    finally:
        for worker in workers:
            worker.close()


async def _play(seed: int, steps: int, staleness: int | None, engines: list[Engine]) -> Records:
    records, heads = Records(), iter(range(1_000_000))
    with (
        closing(open_run(seed, staleness=staleness, engine=engines[0].engine_class)) as run,
        trio.fail_after(600),
    ):
        async with MemorySwarm(seed) as swarm, trio.open_nursery() as nursery:
            for number, engine in enumerate(engines):
                node = Node(run, identity(seed, f"sampler {number}"), swarm.join)
                nursery.start_soon(_sample, node, engine)
            trainer = Node(
                run,
                identity(seed, "trainer"),
                swarm.join,
                luck=lambda: luck(seed, f"head {next(heads)}"),
            )
            await trainer.train(SETTLING_STEPS + steps, records=records, first_samplers=len(engines))
            nursery.cancel_scope.cancel()
    return records


async def _sample(node: Node, engine: Engine) -> None:
    await node.sample(slots_per_call=SLOTS_PER_CALL, engine=engine)


def wall(records: Records, since: int = SETTLING_STEPS) -> float:
    """Seconds from the end of the first `since` steps to the end of the last."""
    return records.steps[-1].at_seconds - records.steps[since - 1].at_seconds


def busy(records: Records, since: int = SETTLING_STEPS) -> float:
    """Return the share of time in which the trainer did not wait for its batch."""
    return 1.0 - sum(record.waited_seconds for record in records.steps[since:]) / wall(records, since)


def measure(
    say: Callable[[str], None], *, turns: int = 7, swarm_turns: int = 7, swarm_steps: int = 60
) -> dict[str, Any]:
    """Every time and ratio, as plain numbers."""
    steps = step_pairs(turns, say)
    swarms = swarm_pairs(swarm_turns, swarm_steps, say)
    ages = [
        age
        for later, _ in swarms
        for record in later.steps[SETTLING_STEPS:]
        for age in record.staleness.elements()
    ]
    median = statistics.median
    return {
        "our_step_ms": 1000 * median(mine for mine, _ in steps),
        "trl_step_ms": 1000 * median(theirs for _, theirs in steps),
        "step_time_over_trl": median(mine / theirs for mine, theirs in steps),
        "async_step_ms": 1000 * median(wall(later) for later, _ in swarms) / swarm_steps,
        "sequential_step_ms": 1000 * median(wall(now) for _, now in swarms) / swarm_steps,
        "async_wall_over_sequential": median(wall(later) / wall(now) for later, now in swarms),
        "trainer_busy_async": median(busy(later) for later, _ in swarms),
        "trainer_busy_async_from_start": median(busy(later, since=1) for later, _ in swarms),
        "trainer_busy_sequential": median(busy(now) for _, now in swarms),
        "async_mean_staleness": statistics.fmean(ages),
        "delay_ms": 1000 * DELAY_SECONDS,
        "volunteers": VOLUNTEERS,
        "step_pairs": [(round(1000 * mine, 1), round(1000 * theirs, 1)) for mine, theirs in steps],
    }
