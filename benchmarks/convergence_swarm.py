"""Training over a swarm of real nodes on the in-memory network of one process.

The network loses nothing and takes no time; signatures, admission, receipts, the weights chain and
its pulls are real. Two samplers with torch engines of their own fill half of a batch each.
Sequential runs repeat exactly. Asynchronous ones go through slow mail, so that groups are as old as
their bound allows. A follower that is neither trainer nor sampler pulls published versions and
measures them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from contextlib import closing

import torch
import trio

from benchmarks.convergence_mail import Mail
from benchmarks.convergence_task import (
    BATCH,
    EVALUATE_EVERY,
    GROUP,
    Curve,
    HeldOut,
    Trained,
    identity,
    luck,
    open_run,
)
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import PeerError
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import Run
from echo_node.telemetry.metrics import Records
from echo_node.weights.open_store import open_store
from echo_node.weights.puller import Puller
from echo_node.weights.weights_view import WeightsView

SAMPLERS = 2
EXTRA_STEPS = 2
"""After the last step that is measured, so that its version can still be pulled."""
LONGEST_SECONDS = 1800.0


def train_sequential(seed: int, steps: int) -> Trained:
    return _train("sequential", seed, steps, None)


def train_async(seed: int, steps: int, staleness: int) -> Trained:
    return _train(f"async S={staleness}", seed, steps, staleness)


def _train(side: str, seed: int, steps: int, staleness: int | None) -> Trained:
    torch.set_num_threads(1)
    start = time.monotonic()
    with closing(open_run(seed, staleness=staleness)) as run:
        curve, records = trio.run(_play, run, seed, steps, staleness)
    ages: Counter[int] = Counter()
    for record in records.steps:
        ages.update(record.staleness)
    assert max(ages) <= (staleness or 0)
    return Trained(side, seed, steps, curve, dict(sorted(ages.items())), time.monotonic() - start)


async def _play(run: Run, seed: int, steps: int, staleness: int | None) -> tuple[Curve, Records]:
    curve: Curve = []
    held_out = HeldOut(run)
    records = Records() if staleness is None else Mail(run.id, staleness)
    heads = itertools.count()
    with trio.fail_after(LONGEST_SECONDS):
        async with MemorySwarm(seed) as swarm, trio.open_nursery() as nursery:
            for number in range(SAMPLERS):
                nursery.start_soon(_sample, run, swarm, seed, number, records)
            if isinstance(records, Mail):
                nursery.start_soon(records.carry)
            nursery.start_soon(follow, run, swarm, seed, steps, held_out, curve)
            trainer = Node(
                run,
                identity(seed, "trainer"),
                swarm.join,
                luck=lambda: luck(seed, f"head {next(heads)}"),
            )
            await trainer.train(steps + EXTRA_STEPS, records=records, first_samplers=SAMPLERS)
            nursery.cancel_scope.cancel()
    return [(step, reward) for step, reward in curve if step <= steps], records


async def _sample(run: Run, swarm: MemorySwarm, seed: int, number: int, records: Records) -> None:
    mail = records if isinstance(records, Mail) else None
    node = Node(
        run,
        identity(seed, f"sampler {number}"),
        swarm.join if mail is None else lambda who: mail.join(swarm, who),
    )
    slots = BATCH // SAMPLERS
    decoder = TorchDecoder(embedded.folder(), device="cpu", dtype="f32", threads=1)
    with closing(LocalEngine(decoder, rows=slots * GROUP)) as engine:
        await node.sample(slots_per_call=slots, engine=engine)


async def follow(
    run: Run,
    swarm: MemorySwarm,
    seed: int,
    steps: int,
    held_out: HeldOut,
    curve: Curve,
    enough: float = math.inf,
) -> None:
    """Pull a version every few steps, and measure it in a thread, until a reward is `enough`."""
    async with (
        swarm.join(identity(seed, "follower")) as network,
        open_store(None, run.rules, network, model=run.folder) as store,
    ):
        puller = Puller(network, store)
        async with puller.work():
            head, due = None, 0
            while due <= steps and (not curve or curve[-1][1] < enough):
                head = await puller.chain.wait_for_newer(head.id if head else None)
                if head.message.step < due:
                    continue
                try:
                    weights = await puller.use(head, _weights)
                except PeerError:  # it was pruned before it was here: the next will do
                    continue
                reward = await trio.to_thread.run_sync(held_out.reward, weights)
                curve.append((head.message.step, reward))
                due = head.message.step // EVALUATE_EVERY * EVALUATE_EVERY + EVALUATE_EVERY
                due = min(due, steps) if head.message.step < steps else due


def _weights(held: WeightsView) -> dict[str, torch.Tensor]:
    """Copy the state, which changes with the next version."""
    return {
        name: torch.frombuffer(bytearray(each.data), dtype=torch.bfloat16).view(each.shape)
        for name, each in held.state.items()
    }
