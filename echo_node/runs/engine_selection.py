"""Select engine class and concurrent groups by memory; start the engine.

The estimate is conservative; what does not fit after all is refused when it is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from echo_node.engine.base import Engine
from echo_node.engine.engine_classes import EngineSpec, ready_classes, torch_device
from echo_node.engine.host_resources import SPARE, available_memory
from echo_node.engine.worker.client import WorkerEngine
from echo_node.errors import ConfigError, boundary
from echo_node.models.folder import map_folder
from echo_node.runs.run import Run
from echo_node.runtime.resource_limits import ResourceLimits
from echo_node.runtime.threads import run_abandonable

MOST_SLOTS: Final = 16
"""Groups that an engine generates at once."""
MOST_ROWS: Final = 128
"""Completions that an engine samples at once."""
_WEIGHT_BYTES: Final = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_LIBRARY_BYTES: Final = {"torch": 500_000_000, "llama": 100_000_000}
"""Memory of the library before any weight is loaded, in bytes."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory needs of a run for any engine: parameters, values per group."""

    parameters: int
    group_values: int

    @classmethod
    def of(cls, run: Run) -> Needs:
        """Read them from the model's files; what its configuration lacks counts as zero."""
        with boundary(ConfigError, f"reading the model in {run.folder}"):
            config: dict[str, Any] = json.loads((run.folder / "config.json").read_bytes())
            heads = config.get("num_attention_heads") or 1
            head = config.get("head_dim") or config.get("hidden_size", 0) // heads
            token = (
                2 * config.get("num_hidden_layers", 0) * (config.get("num_key_value_heads") or heads) * head
            )
        sampling = run.manifest.sampling
        return cls(
            sum(math.prod(tensor.shape) for tensor in map_folder(run.folder).values()),
            token * sampling.group_size * (sampling.max_prompt + sampling.max_tokens),
        )

    def weights(self, engine_class: str) -> float:
        medium, _, arithmetic = engine_class.partition("/")
        return _LIBRARY_BYTES[medium] + _WEIGHT_BYTES[arithmetic] * self.parameters

    def group(self, engine_class: str) -> float:
        return (4 if engine_class.endswith("/f32") else 2) * self.group_values


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The chosen engine class and number of groups, and why."""

    engine_class: str
    slots: int
    why: str


def select_engine(
    run: Run, allowance: ResourceLimits, engine_class: str | None = None, slots: int | None = None
) -> EngineChoice:
    """Choose the best engine class that fits, and as many groups as fit beside.

    `engine_class` and `slots` override the choice.
    """
    allowed = {each.engine for each in run.manifest.engines}
    classes = [engine_class] if engine_class else ready_classes(allowed, allowance.device)
    if allowance.memory is None and "cpu" not in {allowance.device, torch_device()}:
        return EngineChoice(classes[0], slots or MOST_SLOTS, "the memory of the GPU is not estimated")
    room = available_memory() if allowance.memory is None else allowance.memory
    if room is None:
        return EngineChoice(classes[0], slots or MOST_SLOTS, "this machine does not report its free memory")
    whose = "are free" if allowance.memory is None else "--max-memory allows"
    return select_within(SPARE * room, whose, classes, Needs.of(run), slots)


def select_within(
    room: float, whose: str, classes: list[str], needs: Needs, slots: int | None = None
) -> EngineChoice:
    """Choose the first class that fits `room` bytes with one group, or the smallest."""
    smallest = min(classes, key=needs.weights)
    fitting = [each for each in classes if needs.weights(each) + needs.group(each) <= room]
    found = (fitting or [smallest])[0]
    left = room - needs.weights(found)
    fit = max(1, min(MOST_SLOTS, int(left // max(1.0, needs.group(found)))))
    taken = needs.weights(found) + (slots or fit) * needs.group(found)
    why = f"about {taken / 1e9:.2f} GB of the {room / 1e9:.2f} GB that {whose}"
    if larger := classes[: classes.index(found)]:
        why += f"; {', '.join(larger)} would take more"
    return EngineChoice(found, slots or fit, why)


@asynccontextmanager
async def open_worker(
    run: Run,
    allowance: ResourceLimits,
    engine_class: str,
    *,
    completions: int,
    threads: int | None,
    start: bool = True,
) -> AsyncGenerator[Engine]:
    """Open an engine of a run in its own process, and close it at the end.

    It is started now, or with its first use.
    """
    rows = max(1, min(MOST_ROWS, completions))
    spec = EngineSpec(engine_class, run.folder, device=allowance.device, rows=rows, threads=threads)
    engine = WorkerEngine(spec, memory_bytes=allowance.memory)
    try:
        if start:
            await run_abandonable(engine.start)
        yield engine
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(engine.close)
