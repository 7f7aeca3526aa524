"""One trainer of many processes under `torchrun`: rank 0 is the peer, the others do as it says.

    relaunch(2, argv)     starts the processes, each with the same command, and waits for them
    rank()                which of them this is; 0 also where there is only one
    lead_ranks()          on rank 0, for the life of the node: it opens steps over all of them, one after the other
    serve_rank()          on the others: do as rank 0 says, until it says that it is over

What rank 0 says goes by broadcast, as plain bytes; where it has nothing to say, that it is still there, however long it stands by.
A rank that is gone or silent ends all of them within a deadline, with an error that says so. It knows nothing of runs and networks.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echo_node.engine.pulse import die_with
from echo_node.errors import ConfigError, DefectError, EngineError, boundary
from echo_node.trainer.checkpoint import Checkpoint, from_bytes, to_bytes
from echo_node.trainer.grpo import GrpoSettings
from echo_node.trainer.launching import local_rank, rank, ranks, relaunch
from echo_node.trainer.packing import SampledCompletion, TrainingGroup
from echo_node.trainer.policy import best_device
from echo_node.trainer.sharded import Sharded
from echo_node.trainer.step import StepFigures, StepSettings, TrainStep

__all__ = ["Ranks", "lead_ranks", "rank", "ranks", "relaunch", "serve_rank"]

log = logging.getLogger(__name__)
DEADLINE_SECONDS: Final = 300.0
"""How long a rank waits for another."""
STAY_SECONDS: Final = 60.0
"""How often rank 0 says that it is still there, when it has nothing else to say."""
_ADVICE: Final = "the first rank that failed has said why, above; the run can be resumed from its checkpoint"


class Order(IntEnum):
    """What rank 0 says."""

    STAY = 0
    OPEN = 1
    STEP = 2
    PUBLISHED = 3
    CHECKPOINT = 4
    RESTORE = 5
    ADOPT = 6
    CLOSE = 7
    END = 8


class Ranks:
    """All ranks, as rank 0 has them; without a line to others, this process alone."""

    def __init__(self, orders: Orders | None = None) -> None:
        self._orders = orders

    @contextmanager
    def open_step(
        self, folder: Path, settings: StepSettings, *, threads: int, device: str = "auto"
    ) -> Iterator[TrainStep]:
        """The step over all ranks, for one reign. Afterwards they wait for the next."""
        if self._orders is None:
            yield TrainStep(folder, settings, threads=threads, device=device)
            return
        try:
            yield LeadingStep(self._orders, folder, settings, threads=threads, device=device)
        finally:  # where one of them is gone already, that has been said
            with suppress(EngineError), self._orders.give(Order.CLOSE):
                pass


@contextmanager
def lead_ranks() -> Iterator[Ranks]:
    """All ranks, which stay for as long as the block lasts, whether there is a step to take or not."""
    if ranks() == 1:
        yield Ranks()
        return
    if rank() != 0:
        raise DefectError("only rank 0 leads")
    with _group() as orders:
        try:
            with orders.staying():
                yield Ranks(orders)
        finally:
            with suppress(EngineError), orders.give(Order.END):
                dist.barrier()  # nobody hangs up while another still listens


def serve_rank() -> None:
    """Do as rank 0 says, reign after reign, until it says that it is over."""
    with _group() as orders, boundary(EngineError, f"rank {rank()} serving rank 0", advice=_ADVICE):
        step: TrainStep | None = None
        while (heard := orders.hear())[0] is not Order.END:
            try:
                step = _obey(step, *heard)
            except (
                ConfigError,
                DefectError,
            ) as error:  # rank 0 has met the same, and knows what to make of it
                log.warning("rank %d refuses what rank 0 was asked: %s", rank(), error)
        dist.barrier()


class Orders:
    """The line from rank 0 to the others: a number and some bytes, to all of them at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def give(self, order: Order, cargo: bytes = b"") -> Iterator[None]:
        """Say it, and do it in the block: nothing else is said meanwhile."""
        with self._lock, boundary(EngineError, f"the ranks at {order.name}", advice=_ADVICE):
            dist.broadcast(torch.tensor([order, len(cargo)], dtype=torch.int64), src=0)
            if cargo:
                dist.broadcast(torch.frombuffer(bytearray(cargo), dtype=torch.uint8), src=0)
            yield

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Say again and again that rank 0 is there, for as long as the block lasts."""
        over = threading.Event()

        def stay() -> None:
            while not over.wait(STAY_SECONDS):
                with suppress(EngineError), self.give(Order.STAY):
                    pass

        herald = threading.Thread(target=stay, name="ranks stay", daemon=True)
        herald.start()
        try:
            yield
        finally:
            over.set()
            herald.join()

    def hear(self) -> tuple[Order, bytes]:
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, src=0)
        said, length = head.tolist()
        cargo = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.broadcast(cargo, src=0)
        return Order(said), cargo.numpy().tobytes()


class LeadingStep(TrainStep):
    """The step as rank 0 has it: whatever is asked of it, all ranks do."""

    def __init__(
        self, orders: Orders, folder: Path, settings: StepSettings, *, threads: int, device: str
    ) -> None:
        self._orders = orders
        told = {"folder": str(folder), "settings": asdict(settings), "threads": threads, "device": device}
        with orders.give(Order.OPEN, json.dumps(told).encode()):
            here = _device(device)
            super().__init__(folder, settings, threads=threads, device=str(here), shards=Sharded(here))

    def step(self, batch: Sequence[TrainingGroup]) -> StepFigures:
        with self._orders.give(Order.STEP, write_batch(batch)):
            return super().step(batch)

    def published(self) -> dict[str, Tensor]:
        with self._orders.give(Order.PUBLISHED):
            return super().published()

    def checkpoint(self) -> Checkpoint:
        with self._orders.give(Order.CHECKPOINT):
            return super().checkpoint()

    def restore(self, checkpoint: Checkpoint) -> None:
        with self._orders.give(Order.RESTORE, to_bytes(checkpoint)):
            super().restore(checkpoint)

    def adopt(self, published: Mapping[str, Tensor], *, version: int | None = None) -> int:
        told = Checkpoint(self.version if version is None else version, published)
        with self._orders.give(Order.ADOPT, to_bytes(told)):
            return super().adopt(published, version=told.step)


@contextmanager
def _group() -> Iterator[Orders]:
    """The process group. CPU tensors go by gloo, those of a GPU by NCCL."""
    die_with(os.getppid())  # a rank without its launcher would train on by itself
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with boundary(EngineError, f"rank {rank()} meeting the others", advice=_ADVICE):
        dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_SECONDS))
    try:
        yield Orders()
    finally:
        dist.destroy_process_group()


def _open(cargo: bytes) -> TrainStep:
    told: dict[str, Any] = json.loads(cargo)
    numbers = told["settings"]
    grpo = GrpoSettings(**numbers.pop("grpo"))
    tuples = {"betas": tuple(numbers["betas"]), "spreads": tuple(map(tuple, numbers["spreads"]))}
    settings = StepSettings(**{**numbers, **tuples}, grpo=grpo)
    here = _device(told["device"])
    return TrainStep(
        Path(told["folder"]), settings, threads=told["threads"], device=str(here), shards=Sharded(here)
    )


def _obey(step: TrainStep | None, order: Order, cargo: bytes) -> TrainStep | None:
    """Do it, and say which step there is afterwards."""
    match order:
        case Order.STAY:
            return step
        case Order.OPEN:
            return _open(cargo)
        case Order.CLOSE:
            return None
    if step is None:
        raise EngineError(f"rank 0 said {order.name}, and no step is open")
    match order:
        case Order.STEP:
            step.step(read_batch(cargo))
        case Order.PUBLISHED:
            step.published()
        case Order.CHECKPOINT:
            step.checkpoint()
        case Order.RESTORE:
            step.restore(from_bytes(cargo, blame=DefectError))
        case Order.ADOPT:
            told = from_bytes(cargo, blame=DefectError)
            step.adopt(told.tensors, version=told.step)
    return step


def _device(asked: str) -> torch.device:
    kind = best_device() if asked == "auto" else asked
    return torch.device(f"cuda:{local_rank()}" if kind == "cuda" else kind)


def write_batch(batch: Sequence[TrainingGroup]) -> bytes:
    """The batch as msgpack; every number keeps its bits."""

    def raw(values: Any, dtype: str) -> bytes:
        return np.ascontiguousarray(values, dtype).tobytes()

    packed: bytes = msgpack.packb(
        [
            [
                raw(group.prompt_ids, "<i8"),
                [[raw(ids, "<i8"), raw(mu, "<f8"), float(reward)] for ids, mu, reward in group.completions],
                group.current,
                float(group.sigma),
            ]
            for group in batch
        ]
    )
    return packed


def read_batch(data: bytes) -> list[TrainingGroup]:
    return [
        TrainingGroup(
            np.frombuffer(prompt_ids, "<i8"),
            [
                SampledCompletion(np.frombuffer(ids, "<i8"), np.frombuffer(mu, "<f8"), reward)
                for ids, mu, reward in completions
            ],
            current,
            sigma,
        )
        for prompt_ids, completions, current, sigma in msgpack.unpackb(data)
    ]
