"""A trainer that learns from a recorded log of groups until it is killed.

    python -m tests.trainer.crash_points FOLDER KILLS SEED [HEAD_EVERY]
    python -m tests.trainer.crash_points FOLDER beside

The log is recorded once, by an undisturbed trainer, with groups that a real engine sampled under
heads up to two steps old; many of its batches are drawn while the head before is being published.
Each life after that is a fork that works on one folder and ends by SIGKILL: at a random moment, or
at one of its disk operations; with `beside`, at each moment of a head that is published while the
gradient of the next batch is computed. Whenever one comes to the end of the log, its heads are
compared with the undisturbed trainer's.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import time
import traceback
from pathlib import Path

import trio

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import read_model
from echo_node.sampler.rollout import Rollout
from echo_node.storage import files
from echo_node.storage.sqlite import SqliteFile
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import StepDb, read_records
from echo_node.trainer import loop as loop_room
from echo_node.trainer.head_publisher import HeadPublisher
from echo_node.trainer.journal import open_journal
from echo_node.trainer.loop import TrainerLoop
from echo_node.trainer.step import TrainStep
from echo_node.weights.engine_sync import hand_over, opened
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of
from protocol import Envelope, Join, TrajectoryGroup, canonical, derive, merkle_root, seal
from protocol.digest import ZERO
from tests.crafting import ENGINE, SAMPLERS, TRAINER, changed_run, open_run

ROOT = Path(__file__).parents[2]
RUN = open_run("async", staleness=2, group_size=4)
LAYOUT = layout_of(read_model(embedded.folder()))
STEPS = 12
CHECKPOINT_EVERY = 3
ANN, BOB = SAMPLERS[:2]
TOUCHES = ("write_at", "rename", "sync", "unlink", "open_file")


class Recording:
    """A source that has an engine fill the slots of each batch, and writes down what came of it."""

    def __init__(self, store):
        self.batches = []
        self._store = store
        self._engine = make_engine(EngineSpec(ENGINE, embedded.folder(), "cpu", 16, 1))
        self._slots = {}

    async def next_batch(self, request):
        number = request.number
        bound = RUN.manifest.sync.staleness
        every = RUN.manifest.sync.head_every
        due = (number - 1) // every * every  # step of the newest head, signed or in progress
        fresh, age = self._fresh(number, bound, before=due), number % 3
        if number // every % 2 or not fresh:
            await self.heads.wait_read()
            fresh, age = self._fresh(number, bound), age + 1
        sealed = []
        for back, sampler in ((0, ANN), (max(0, age - 1), BOB)):
            under = fresh[max(0, len(fresh) - 1 - back)]
            with opened(self._store, under.id) as held:
                hand_over(held, self._engine)
            first = self._slots.get((under.id, sampler), 0)
            self._slots[under.id, sampler] = first + 2
            groups = Rollout(RUN, sampler, self._engine).fill(under, range(first, first + 2), lambda: False)
            sealed += [group.sealed for group in groups]
        self.batches.append(sealed)
        return self.admit(sealed)

    def _fresh(self, number, bound, before=STEPS):
        heads = self._store.follower.heads
        return [each for each in heads if number - 1 - bound <= each.message.step < before]

    def admit(self, sealed):
        judged = [self.judge(Envelope.parse(each)) for each in sealed]
        assert all(isinstance(each, RolloutRecord) for each in judged), judged
        return tuple(judged)


class Replaying(Recording):
    """A source that reads such a log."""

    def __init__(self, batches):
        self.batches = batches

    async def next_batch(self, request):
        await trio.lowlevel.checkpoint()
        sealed = self.batches[request.number - 1]
        if {head_of(each) for each in sealed} - self.earlier_heads():
            await self.heads.wait_read()
        return self.admit(sealed)


async def train(folder, make_source, steps=STEPS, threads=1, begun=lambda: None):
    """One life of a trainer, with everything real around it but other peers."""
    folder.mkdir(exist_ok=True)
    step = TrainStep(RUN.folder, training_settings(RUN.manifest).step, threads=threads, device="cpu")
    begun()
    write_metadata(folder / "weights", RUN.sealed_manifest, LAYOUT)
    records = Records()
    records.recall(read_records(folder / "records.sqlite"))
    with (
        WeightsStore.open(folder / "weights", RUN.rules, LAYOUT) as store,
        records.writing_to(StepDb(folder / "records.sqlite")),
    ):
        publisher = Publisher(
            store, TRAINER, luck=lambda: derive("luck", len(store.follower.heads).to_bytes(8))
        )
        async with (
            open_journal(folder / "journal.sqlite", RUN.id) as journal,
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as network,
        ):
            for sampler in (ANN, BOB):
                join = Join(agent="", engine=ENGINE, head=ZERO, name="")
                await journal.join(sampler.public, seal(join, sampler, RUN.id))
            source = make_source(store)
            loop = TrainerLoop(
                RUN,
                network,
                TRAINER,
                step=step,
                publisher=publisher,
                records=records,
                journal=journal,
                checkpoints=folder / "checkpoints",
                checkpoint_every=CHECKPOINT_EVERY,
                source=source,
            )
            source.judge, source.heads = loop.groups.admission.judge, loop._heads
            source.earlier_heads = lambda: {
                head.id for head in store.follower.heads if head.message.version < loop._heads.version
            }
            await loop.work(steps, first_samplers=2)
    return loop, source


def head_of(sealed):
    return Envelope.parse(sealed).claim(TrajectoryGroup, RUN.id).heads[0]


def heads_in(folder):
    """The ids of all heads, in order: they commit to weights, rosters, groups and each other."""
    with WeightsStore.open(folder / "weights", RUN.rules, LAYOUT, durable=False) as store:
        return [head.id for head in store.follower.heads]


def record(folder, log):
    """The undisturbed run."""
    _, source = trio.run(train, folder, Recording)
    log.write_bytes(canonical.encode([*source.batches], most=2**26))


def read_log(log):
    return [[bytes(each) for each in batch] for batch in canonical.decode(log.read_bytes(), most=2**26)]


def die_at(touch):
    """End this process at one of its disk operations.

    A write gets half-way, a commit is done or not.
    """
    left = [touch]

    def count():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(real):
        def act(*args, **options):
            count()
            return real(*args, **options)

        return act

    def transact(file, work):
        count()
        done = transacted(file, work)
        count()
        return done

    transacted = SqliteFile._transact
    SqliteFile._transact = transact
    for name in TOUCHES:
        setattr(files, name, deadly(getattr(files, name)))


def die_beside_a_step(version, moment):
    """End this process at a moment of publishing a version, with the next batch under way."""
    begun = threading.Event()
    real_accumulate, real_sign = loop_room.accumulate, HeadPublisher._sign
    real_activate = HeadPublisher._activate

    def reach(head, reached):
        if (head.version, reached) == (version, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def accumulate(step, batch):
        if batch.version == version + 1:
            begun.set()
        real_accumulate(step, batch)

    def sign(heads, head):
        if head.version == version and not begun.wait(60):
            raise RuntimeError("the next batch does not begin while a head is published")
        reach(head, "begun")
        signed = real_sign(heads, head)
        reach(head, "signed")
        return signed

    def activate(heads, head):
        reach(head, "announced")
        real_activate(heads, head)
        reach(head, "active")

    loop_room.accumulate = accumulate
    HeadPublisher._sign, HeadPublisher._activate = sign, activate


MOMENTS = {"begun": 0, "signed": 1, "announced": 1, "active": 1}
"""Moments of publishing a head, and whether it is on the chain by then."""


def beside(folder: Path) -> None:
    """Kill a trainer at each moment of a head that is published beside the next step."""
    folder.mkdir(exist_ok=True)
    undisturbed, log, work = folder / "undisturbed", folder / "log", folder / "killed"
    child = in_a_fork(lambda: record(undisturbed, log))
    assert os.waitpid(child, 0)[1] == 0
    batches, expected = read_log(log), heads_in(undisturbed)
    version = 5  # whose successor's batch is drawn without waiting for it

    def life(moment):
        die_beside_a_step(version, moment)
        trio.run(train, work, lambda _: Replaying(batches))

    for moment, is_signed in MOMENTS.items():
        child = in_a_fork(lambda moment=moment: life(moment))
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"it was not killed when {moment}"
        assert heads_in(work) == expected[: version + is_signed]
        with sqlite3.connect(work / "journal.sqlite") as file:
            assert file.execute("SELECT max(number) FROM batches").fetchone() == (version + 1,)
        file.close()
        finish(work, batches)
        check(work, expected, batches)
        shutil.rmtree(work)
    sys.stdout.write(f"{len(MOMENTS)} kills beside a step\n")


def in_a_fork(work) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def live_and_die(folder, batches, luck) -> bool:
    """One life; whether it was killed before it came to the end of the log."""
    touch, seconds, by_touch = luck.randint(1, 260), luck.uniform(0.0, 1.0), luck.random() < 0.6
    reading, writing = os.pipe()

    def life():
        if by_touch:
            die_at(touch)
        trio.run(train, folder, lambda _: Replaying(batches), STEPS, 1, lambda: os.write(writing, b"!"))

    child = in_a_fork(life)
    os.close(writing)
    if not by_touch:
        os.read(reading, 1)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a life ended with an error, and not by being killed")
    return os.WIFSIGNALED(status)


def check(folder, expected, batches):
    """Check the killed trainer's heads, and that it used each group once."""
    assert heads_in(folder) == expected, "another run than the undisturbed one"
    steps = read_records(folder / "records.sqlite")
    assert [record.number for record in steps] == list(range(1, STEPS + 1))
    used = [[group.id for group in record.groups] for record in steps]
    assert used == [[Envelope.parse(sealed).id for sealed in batch] for batch in batches]
    with sqlite3.connect(folder / "journal.sqlite") as file:
        rows = file.execute("SELECT batch, id FROM groups WHERE state = 1 ORDER BY batch, place").fetchall()
    file.close()
    assert rows == [(number, group) for number, ids in enumerate(used, 1) for group in ids]
    with WeightsStore.open(folder / "weights", RUN.rules, LAYOUT, durable=False) as store:
        roots = [head.message.groups for head in store.follower.heads[1:]]
    every = RUN.manifest.sync.head_every
    together = [
        [group for ids in used[first : first + every] for group in ids] for first in range(0, STEPS, every)
    ]
    assert roots == [merkle_root(sorted(ids)) for ids in together]


def main(folder: Path, kills: int, seed: int, head_every: int = 1) -> None:
    global RUN  # noqa: PLW0603 - a program that is about one run
    if head_every > 1:
        RUN = changed_run(RUN, sync=dataclasses.replace(RUN.manifest.sync, head_every=head_every))
    luck, done, lives, ends = random.Random(seed), 0, 0, 0
    folder.mkdir(exist_ok=True)
    undisturbed, log, work = folder / "undisturbed", folder / "log", folder / "killed"
    child = in_a_fork(lambda: record(undisturbed, log))
    assert os.waitpid(child, 0)[1] == 0
    batches, expected = read_log(log), heads_in(undisturbed)
    assert len(expected) == STEPS // head_every + 1
    while done < kills or work.exists():
        killed = live_and_die(work, batches, luck) if done < kills else finish(work, batches)
        done, lives = done + killed, lives + 1
        if not killed and work.exists():
            check(work, expected, batches)
            shutil.rmtree(work)
            ends += 1
    sys.stdout.write(f"{done} kills, {lives} lives, {ends} runs to the end\n")


def finish(work, batches) -> bool:
    child = in_a_fork(lambda: trio.run(train, work, lambda _: Replaying(batches)))
    assert os.waitpid(child, 0)[1] == 0
    return False


if __name__ == "__main__":
    if sys.argv[2:] == ["beside"]:
        beside(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
