"""Distributed training under `torchrun`: rank 0 is the peer, other ranks obey it.

    relaunch(2, argv)     starts the processes, each with the same command, and waits for them
    rank()                the rank of this process; 0 also where there is only one
    lead_ranks()          on rank 0, for the life of the node: opens steps over all ranks
    serve_rank()          on the others: execute the orders of rank 0 until END

Orders of rank 0 are broadcast as plain bytes; an idle rank 0 broadcasts STAY, however long it
stands by. A rank that is gone or silent ends all of them within a deadline, with an error that says
so.
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

from echo_node.engine.worker.watchdog import die_with
from echo_node.errors import ConfigError, DefectError, EngineError, boundary
from echo_node.runs.algorithm import GrpoSettings, StepSettings
from echo_node.trainer.checkpoint import Checkpoint, from_bytes, to_bytes
from echo_node.trainer.fsdp import FsdpSharded
from echo_node.trainer.policy_model import best_device
from echo_node.trainer.step import StepFigures, TrainStep
from echo_node.trainer.torchrun import local_rank, rank, ranks, relaunch
from echo_node.trainer.tree_packing import TrainingGroup

__all__ = ["Ranks", "lead_ranks", "rank", "ranks", "relaunch", "serve_rank"]

log = logging.getLogger(__name__)
DEADLINE_SECONDS: Final = 300.0
"""Seconds that a rank waits for another."""
STAY_SECONDS: Final = 60.0
"""Seconds between the keep-alives of rank 0 while it is idle."""
_ADVICE: Final = (
    "the first rank that failed logged the reason above; the run can be resumed from its checkpoint"
)


class Order(IntEnum):
    """Orders that rank 0 broadcasts."""

    STAY = 0
    OPEN = 1
    ACCUMULATE = 2
    UPDATE = 3
    PUBLISHED = 4
    CHECKPOINT = 5
    RESTORE = 6
    ADOPT = 7
    CLOSE = 8
    END = 9


class Ranks:
    """All ranks, as seen by rank 0; without `orders`, this process alone."""

    def __init__(self, orders: Orders | None = None) -> None:
        self._orders = orders

    @contextmanager
    def open_step(
        self, folder: Path, settings: StepSettings, *, threads: int, device: str = "auto"
    ) -> Iterator[TrainStep]:
        """Open the step over all ranks, for one term. Afterwards they wait for the next."""
        if self._orders is None:
            yield TrainStep(folder, settings, threads=threads, device=device)
            return
        try:
            yield LeadingStep(self._orders, folder, settings, threads=threads, device=device)
        finally:  # a rank that is gone has been reported already
            with suppress(EngineError), self._orders.give(Order.CLOSE):
                pass


@contextmanager
def lead_ranks() -> Iterator[Ranks]:
    """Keep all ranks alive for the block, whether there is a step to take or not."""
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
                dist.barrier()  # no rank closes the group while another still receives


def serve_rank() -> None:
    """Execute the orders of rank 0, term after term, until END."""
    with _group() as orders, boundary(EngineError, f"rank {rank()} serving rank 0", advice=_ADVICE):
        step: TrainStep | None = None
        while (received := orders.receive())[0] is not Order.END:
            try:
                step = _obey(step, *received)
            except (ConfigError, DefectError) as error:  # rank 0 met the same, and handles it
                log.warning("rank %d refused an order of rank 0: %s", rank(), error)
        dist.barrier()


class Orders:
    """Broadcast channel from rank 0 to the others: an order and some bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def give(self, order: Order, payload: bytes = b"") -> Iterator[None]:
        """Broadcast an order, and run the block before any other order is given."""
        with self._lock, boundary(EngineError, f"the ranks at {order.name}", advice=_ADVICE):
            dist.broadcast(torch.tensor([order, len(payload)], dtype=torch.int64), src=0)
            if payload:
                dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)
            yield

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Broadcast keep-alives for as long as the block lasts."""
        stopped = threading.Event()

        def stay() -> None:
            while not stopped.wait(STAY_SECONDS):
                with suppress(EngineError), self.give(Order.STAY):
                    pass

        sender = threading.Thread(target=stay, name="ranks stay", daemon=True)
        sender.start()
        try:
            yield
        finally:
            stopped.set()
            sender.join()

    def receive(self) -> tuple[Order, bytes]:
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, src=0)
        order, length = head.tolist()
        payload = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.broadcast(payload, src=0)
        return Order(order), payload.numpy().tobytes()


class LeadingStep(TrainStep):
    """The step on rank 0: every call is executed by all ranks."""

    def __init__(
        self, orders: Orders, folder: Path, settings: StepSettings, *, threads: int, device: str
    ) -> None:
        self._orders = orders
        arguments = {
            "folder": str(folder),
            "settings": asdict(settings),
            "threads": threads,
            "device": device,
        }
        with orders.give(Order.OPEN, json.dumps(arguments).encode()):
            here = _device(device)
            super().__init__(folder, settings, threads=threads, device=str(here), shards=FsdpSharded(here))

    def accumulate(self, batch: Sequence[TrainingGroup]) -> None:
        with self._orders.give(Order.ACCUMULATE, write_batch(batch)):
            super().accumulate(batch)

    def update(self) -> StepFigures:
        with self._orders.give(Order.UPDATE):
            return super().update()

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
        state = Checkpoint(self.version if version is None else version, published)
        with self._orders.give(Order.ADOPT, to_bytes(state)):
            return super().adopt(published, version=state.step)


@contextmanager
def _group() -> Iterator[Orders]:
    """Open the process group. CPU tensors go by gloo, those of a GPU by NCCL."""
    die_with(os.getppid())  # a rank must not outlive its launcher
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with boundary(EngineError, f"rank {rank()} meeting the others", advice=_ADVICE):
        dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_SECONDS))
    try:
        yield Orders()
    finally:
        dist.destroy_process_group()


def _open(payload: bytes) -> TrainStep:
    arguments: dict[str, Any] = json.loads(payload)
    numbers = arguments["settings"]
    grpo = GrpoSettings(**numbers.pop("grpo"))
    tuples = {"betas": tuple(numbers["betas"]), "spreads": tuple(map(tuple, numbers["spreads"]))}
    settings = StepSettings(**{**numbers, **tuples}, grpo=grpo)
    here = _device(arguments["device"])
    return TrainStep(
        Path(arguments["folder"]),
        settings,
        threads=arguments["threads"],
        device=str(here),
        shards=FsdpSharded(here),
    )


def _obey(step: TrainStep | None, order: Order, payload: bytes) -> TrainStep | None:
    """Execute an order, and return the step that is open afterwards."""
    match order:
        case Order.STAY:
            return step
        case Order.OPEN:
            return _open(payload)
        case Order.CLOSE:
            return None
    if step is None:
        raise EngineError(f"rank 0 ordered {order.name}, and no step is open")
    _call(step, order, payload)
    return step


def _call(step: TrainStep, order: Order, payload: bytes) -> None:
    """Execute an order to the step that is open."""
    match order:
        case Order.ACCUMULATE:
            step.accumulate(read_batch(payload))
        case Order.UPDATE:
            step.update()
        case Order.PUBLISHED:
            step.published()
        case Order.CHECKPOINT:
            step.checkpoint()
        case Order.RESTORE:
            step.restore(from_bytes(payload, blame=DefectError))
        case Order.ADOPT:
            state = from_bytes(payload, blame=DefectError)
            step.adopt(state.tensors, version=state.step)


def _device(requested: str) -> torch.device:
    kind = best_device() if requested == "auto" else requested
    return torch.device(f"cuda:{local_rank()}" if kind == "cuda" else kind)


def write_batch(batch: Sequence[TrainingGroup]) -> bytes:
    """Return the batch as msgpack; every number keeps its bits."""

    def raw(values: Any, dtype: str) -> bytes:
        return np.ascontiguousarray(values, dtype).tobytes()

    packed: bytes = msgpack.packb(
        [
            [
                raw(group.prompt_ids, "<i8"),
                [raw(ids, "<i8") for ids in group.ids],
                [raw(mu, "<f8") for mu in group.mu],
                [float(reward) for reward in group.rewards],
                group.current,
                float(group.sigma),
                float(group.gap_cap),
                [bool(cut) for cut in group.truncated],
                group.drawn and [raw(drawn, "|b1") for drawn in group.drawn],
            ]
            for group in batch
        ]
    )
    return packed


def read_batch(data: bytes) -> list[TrainingGroup]:
    return [
        TrainingGroup(
            np.frombuffer(prompt_ids, "<i8"),
            [np.frombuffer(each, "<i8") for each in ids],
            [np.frombuffer(each, "<f8") for each in mu],
            rewards,
            current,
            sigma,
            gap_cap,
            truncated,
            drawn and [np.frombuffer(each, "|b1") for each in drawn],
        )
        for prompt_ids, ids, mu, rewards, current, sigma, gap_cap, truncated, drawn in msgpack.unpackb(data)
    ]
