"""A real run folder, made in one process within seconds on the in-memory network.

Two trainers, two samplers and a verifier.

The leader is ended in the middle of things, so that there is a change of leaders to account for;
the other trains on. Nodes are real, as is what they leave; only the harness around them is small.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import trio

from echo_node.credit.ledger import Ledger
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.spec import MANIFEST
from echo_node.telemetry.events import Events, StepEvents
from echo_node.telemetry.metrics import Records
from echo_node.trainer.checkpoint_schedule import CheckpointSchedule
from protocol.manifest import Terms, Verification
from tests.crafting import SAMPLERS, TRAINER, changed_run, identity, open_run

STALENESS = 4
"""Wide enough for what the first leader has used to be fresh when the second begins."""
HEIR, JUDGE = identity("heir"), identity("judge")
NAMES = {
    "trainer": ("trainer", TRAINER),
    "standby": ("trainer", HEIR),
    "verifier": ("verifier", JUDGE),
    "ann": ("sampler", SAMPLERS[0]),
    "bob": ("sampler", SAMPLERS[1]),
}
FIRST, LATER = 7, 5
"""Steps of the first leader, and of the second."""
CHECKPOINT_EVERY = {"trainer": 3, "standby": 1_000}
"""The first lets go of the bytes of what it has learnt from, the second keeps them."""


def small_run():
    return changed_run(
        open_run("async", staleness=STALENESS, group_size=4),
        trainers=(TRAINER.public, HEIR.public),
        verifiers=(JUDGE.public,),
        verification=Verification(policy="self", quorum=1, share=0.0),
        terms=Terms(tuple(sorted(each.public for each in (TRAINER, HEIR, JUDGE))), 200, 2000),
    )


class Harness:
    """Writes down what a harness would: the timeline, and what each node tells."""

    def __init__(self, place: Path, run) -> None:
        self.place, self.run = place, run
        self._began = time.monotonic()
        (place / "run").mkdir(parents=True)
        (place / "run" / MANIFEST).write_bytes(run.sealed_manifest.sealed)
        nodes = {
            name: {"role": role, "peer_id": who.peer_id, "engine": None, "honest": True}
            for name, (role, who) in NAMES.items()
        }
        told = {"seed": 1, "nodes": nodes, "started": time.time(), "run": "run", "bound_seconds": 60.0}
        (place / "chaos.json").write_text(json.dumps(told | {"staleness": STALENESS}))
        for name in NAMES:
            self.folder(name).mkdir(parents=True)

    def folder(self, name: str) -> Path:
        return self.place / "nodes" / name / "state" / "runs" / self.run.id.hex()

    def note(self, what: str, node: str | None = None, **more) -> None:
        self._write(self.place / "timeline.jsonl", {"what": what, "node": node, **more})

    def hear(self, name: str, line: str) -> None:
        self._write(self.place / "nodes" / name / "events.jsonl", json.loads(line))

    def _write(self, file: Path, told: dict) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps({**told, "at": round(time.monotonic() - self._began, 3)}) + "\n")

    def events(self, name: str) -> Events:
        return Events(as_json=True, write=lambda line: self.hear(name, line))


@contextmanager
def _engine():
    made = make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))
    try:
        yield made
    finally:
        made.close()


async def _tell(node: Node, events: Events) -> None:
    events.emit("started", "", role="")
    while True:
        await trio.sleep(0.1)
        events.emit("progress", "", **node.status())


async def _until(holds) -> None:
    with trio.fail_after(100):
        while not holds():  # noqa: ASYNC110 - records are plain data and have no event
            await trio.sleep(0.01)


async def _live(harness: Harness) -> None:
    run = harness.run
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        lives: dict[str, trio.CancelScope] = {}

        async def live(name, work):
            """One node, until its scope is cancelled."""
            node = Node(run, NAMES[name][1], swarm.join, folder=harness.folder(name))
            with trio.CancelScope() as lives[name]:
                async with trio.open_nursery() as inner:
                    harness.note("start", name)
                    inner.start_soon(_tell, node, harness.events(name))
                    await work(node)
            harness.note("exit", name)

        async def sample(node):
            with _engine() as engine:
                await node.sample(slots_per_call=2, engine=engine)

        async def verify(node):
            with _engine() as engine, Ledger(harness.folder("verifier") / "ledger.sqlite") as ledger:
                await node.verify(engine=engine, ledger=ledger)

        steps = {name: Records(writers=[StepEvents(harness.events(name))]) for name in ("trainer", "standby")}

        async def train(name, node):
            await node.train(
                10_000,
                records=steps[name],
                first_samplers=2,
                checkpoint_every=CHECKPOINT_EVERY[name],
                early=True,
            )

        nursery.start_soon(live, "trainer", lambda node: train("trainer", node))
        nursery.start_soon(live, "standby", lambda node: train("standby", node))
        nursery.start_soon(live, "verifier", verify)
        nursery.start_soon(live, "ann", sample)
        nursery.start_soon(live, "bob", sample)
        await _until(lambda: len(steps["trainer"].steps) >= FIRST)
        harness.note("fault", "trainer", kind="kill")
        lives["trainer"].cancel()
        harness.note("heal", "trainer", kind="kill")
        before = max(record.step for record in steps["trainer"].steps)
        await _until(lambda: any(record.step >= before + LATER for record in steps["standby"].steps))
        await trio.sleep(0.3)  # what everybody tells once in a tenth of a second
        harness.note("end")
        for scope in lives.values():
            scope.cancel()


async def _nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()


def make_place(place: Path) -> Path:
    """Make a run in this folder.

    Its trainers end as if they were killed: without a last checkpoint, with the bytes of their
    groups.
    """
    with patch.object(CheckpointSchedule, "save_final", _nothing):
        trio.run(_live, Harness(place, small_run()))
    return place
