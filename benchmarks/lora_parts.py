"""Parts of the LoRA benchmark: bytes of versions, memory and time of steps, sampling and swaps."""

from __future__ import annotations

import math
import secrets
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks import engine_models
from benchmarks.lora_models import lora_folder
from benchmarks.size_memory import random_batch, step_memory
from benchmarks.size_time import StepTimes, TrlStep, timed_pairs
from echo_node.engine.base import Engine, SamplingLimits, SlotRequest, TensorBytes, generate_groups
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.host_resources import free_cores
from echo_node.engine.worker.client import WorkerEngine
from echo_node.models.adapter import map_weights, read_adapter
from echo_node.models.folder import map_folder
from echo_node.runs.algorithm import StepSettings, layout_for
from echo_node.trainer.step import TrainingGroup, TrainStep
from echo_node.weights.engine_sync import EngineSync
from echo_node.weights.open_store import read_folder
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of, root_of
from protocol import Identity, Roster, Rules, blob_id, encode

FULL_RATE: Final = 1e-6
"""Learning rate of full training."""
LORA_RATE: Final = 1e-5
"""Learning rate of an adapter: ten times that of full training."""
GROUP: Final = 16
PROMPT: Final = 32


def vocabulary_of(shape: str) -> int:
    return int(str(engine_models.SHAPES[shape]["vocab_size"]))


def parameters_of(folder: Path) -> int:
    """Return the parameters of a folder's base, or of the whole model."""
    return sum(math.prod(weight.shape) for weight in map_folder(folder).values())


@contextmanager
def trained_chain(folder: Path, rate: float) -> Iterator[tuple[TrainStep, WeightsStore, Publisher]]:
    """Give a model in training, a store and the trainer's publisher, with version 0 published."""
    settings = StepSettings(learning_rate=rate, warm_up=0, **layout_for(parameters_of(folder)))
    step = TrainStep(folder, settings, threads=torch.get_num_threads(), device="cpu")
    first = read_folder(folder)
    leader, layout = Identity.generate(), layout_of(first)
    rules = Rules(bytes(32), blob_id(encode(layout)), root_of(first), (leader.public,), (leader.public,))
    del first
    with (
        tempfile.TemporaryDirectory() as place,
        WeightsStore.open(Path(place, "store"), rules, layout) as store,
    ):
        publisher = Publisher(store, leader, luck=lambda: secrets.token_bytes(32))
        publish(step, publisher)
        yield step, store, publisher


def publish(step: TrainStep, publisher: Publisher) -> int:
    """Publish the weights as a trainer does; return the delta's bytes, 0 for the first version."""
    signed = publisher.sign(step.published_state(), step=step.version, roster=Roster(()), groups=())
    publisher.activate(signed)
    head = signed.head.message
    return next((route.size for route in head.routes if route.base == head.previous), 0)


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """Median bytes of a version's delta, and of the whole state in bf16."""

    delta: float
    whole: int

    @property
    def share(self) -> float:
        return self.delta / self.whole


def version_bytes(folder: Path, vocabulary: int, *, rate: float, steps: int, tokens: int) -> VersionBytes:
    """Train some steps and publish each; return the median bytes."""
    with trained_chain(folder, rate) as (step, _store, publisher):
        whole = sum(2 * each.numel() for each in step.published().values())
        found = []
        for number in range(steps):
            step.step(random_batch(vocabulary, 4, 4, tokens, tokens, seed=number))
            found.append(publish(step, publisher))
    return VersionBytes(statistics.median(found), whole)


def base_memory(folder: Path) -> float:
    """Return the trainer's bytes at the optimiser step, per parameter of the base."""
    return step_memory(folder, micro_batches=2, micro_batch_tokens=1, parameters=parameters_of(folder)).total


def peft_times(shape: str, *, groups: int, size: int, tokens: int, pairs: int) -> StepTimes:
    """Time a step beside one of TRL with PEFT, on the same batch."""
    folder, base = lora_folder(shape), engine_models.folder(shape)
    batch: list[TrainingGroup] = random_batch(vocabulary_of(shape), groups, size, tokens, tokens)
    settings = StepSettings(learning_rate=LORA_RATE, **layout_for(parameters_of(folder)))
    ours = TrainStep(folder, settings, threads=torch.get_num_threads(), device="cpu")
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' packages
        return timed_pairs(ours, TrlStep(base, batch, place, read_adapter(folder)), batch, pairs)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second with an adapter and without, medians, and the median of their ratios."""

    adapted: float
    bare: float
    ratio: float


def sampling_speeds(shape: str, engine_class: str, *, tokens: int, pairs: int) -> Speeds:
    """Draw the same slots with an adapter and without, in turn, each in a worker process."""
    limits = SamplingLimits(tokens, 1.0, frozenset(), vocabulary_of(shape))
    draws = np.random.default_rng(0)
    asked = SlotRequest(draws.integers(0, limits.vocab_size, PROMPT), draws.bytes(32), GROUP, limits)
    with (
        _worker(lora_folder(shape), engine_class) as adapted,
        _worker(engine_models.folder(shape), engine_class) as bare,
    ):
        for engine in (adapted, bare):
            _speed(engine, asked)
        found = []
        for turn in range(pairs):
            sides = (adapted, bare) if turn % 2 else (bare, adapted)
            seen = {id(each): _speed(each, asked) for each in sides}
            found.append((seen[id(adapted)], seen[id(bare)]))
    with_it, without = (statistics.median(side) for side in zip(*found, strict=True))
    return Speeds(with_it, without, statistics.median(mine / other for mine, other in found))


@contextmanager
def _worker(folder: Path, engine_class: str) -> Iterator[WorkerEngine]:
    with WorkerEngine(EngineSpec(engine_class, folder, "cpu", GROUP, free_cores())) as engine:
        engine.load(bytes(32), _moved(folder))
        yield engine


def _moved(folder: Path) -> dict[str, TensorBytes]:
    """Return a folder's weights; of an adapter, with a B that is not zero."""
    state = dict(read_folder(folder))
    if read_adapter(folder) is not None:
        draws = np.random.default_rng(1)
        for name, tensor in map_weights(folder).items():
            if "lora_B" in name:
                values = np.float32(0.01) * draws.standard_normal(tensor.shape, np.float32)
                bits = (values.view(np.uint32) >> 16).astype("<u2")
                state[name] = TensorBytes("bf16", tensor.shape, bits.tobytes())
    return state


def _speed(engine: Engine, asked: SlotRequest) -> float:
    began = time.perf_counter()
    drawn = generate_groups(engine, [asked])
    return sum(each.ids.size for each in drawn[0]) / (time.perf_counter() - began)


def swap_seconds(shape: str, engine_class: str, *, steps: int) -> float:
    """Return the median seconds in which a worker's engine goes to the next trained version."""
    folder, found = lora_folder(shape), []
    with (
        trained_chain(folder, LORA_RATE) as (step, store, publisher),
        WorkerEngine(EngineSpec(engine_class, folder, "cpu", GROUP, free_cores())) as engine,
    ):
        sync = EngineSync(store, engine)
        for number in range(steps + 1):
            if number:
                step.step(random_batch(vocabulary_of(shape), 2, 2, 16, 16, seed=number))
                publish(step, publisher)
            tip = store.tip
            assert tip is not None
            began = time.perf_counter()
            sync.at(tip.id)
            found.append(time.perf_counter() - began)
            limits = SamplingLimits(2, 1.0, frozenset(), vocabulary_of(shape))
            generate_groups(engine, [SlotRequest(np.arange(4), bytes(32), GROUP, limits)])
    return statistics.median(found[1:])
