"""A whole swarm of processes: a seed, a trainer, samplers of two engines and a verifier."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from itertools import pairwise
from statistics import fmean

import pytest
import trio

from echo_node.telemetry.step_db import read_records
from tests.swarm.processes import swarm_in

ONE_THREAD = ("--threads", "1")
TORCH = ("--role", "sampler", "--engine", "torch/f32", *ONE_THREAD)
LLAMA = ("--role", "sampler", "--engine", "llama/f16", *ONE_THREAD)
VERIFIER = ("--role", "verifier", *ONE_THREAD)
SEQUENTIAL_STEPS, STEPS = 6, 24


def trainer_words(*, steps=None, first_samplers=1):
    told = ("--steps", str(steps)) if steps else ()
    return ("--role", "trainer", *ONE_THREAD, "--first-samplers", str(first_samplers), *told)


async def start_all(swarm, steps):
    """Everybody at once. The trainer begins when both samplers have joined."""
    trainer = await swarm.start("trainer", *trainer_words(steps=steps, first_samplers=2))
    samplers = [await swarm.start("torch", *TORCH), await swarm.start("llama", *LLAMA)]
    return trainer, samplers, await swarm.start("verifier", *VERIFIER)


def mean_reward(steps):
    return fmean(step["reward"] for step in steps)


def check_sequential(steps):
    """Every group of a step is of the version before it, and of no other."""
    for before, step in pairwise(steps):
        assert step["heads"] == [before["head"]]
        assert set(step["staleness"]) == {"0"}


def notes_of(folder):
    """The verifier's evidence on groups not found honest: engine, version, reason, all tokens."""
    asked = (
        "SELECT engine, version, verdicts.reason, note, figures FROM verdicts JOIN groups USING (id)"
        " WHERE result != 'honest'"
    )
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as file:
        return file.execute(asked).fetchall(), [each.read_text() for each in folder.glob("condemned/*.json")]


@pytest.mark.timeout(400)
async def test_five_processes_learn_first_by_asking_and_then_without_waiting(tmp_path):
    sync = {"mode": "async", "async_from": SEQUENTIAL_STEPS}
    algorithm = {"learning_rate": 3e-4, "warm_up": 4}
    async with swarm_in(tmp_path, sync=sync, algorithm=algorithm) as swarm:
        trainer, samplers, verifier = await start_all(swarm, STEPS)
        await trainer.until(lambda node: node.all("stopped"), within=300)
        steps = trainer.all("step")
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
        check_sequential(steps[:SEQUENTIAL_STEPS])
        assert len(steps[0]["heads"]) == 1
        for each in steps[SEQUENTIAL_STEPS:]:
            assert max(map(int, each["staleness"])) <= 4
        assert mean_reward(steps[-6:]) > mean_reward(steps[:6]) + 0.05
        asked, pushed = (
            {name for step in part for name in step["samplers"]}
            for part in (steps[:SEQUENTIAL_STEPS], steps[SEQUENTIAL_STEPS:])
        )
        assert asked == pushed == {sampler.peer_id for sampler in samplers}
        for sampler in samplers:
            await sampler.until(lambda node: node.last("progress").get("accepted", 0) > 0)
            assert sampler.all("joined")
            refused = sampler.last("progress")["refused"]
            assert set(refused) <= {"stale", "full"}, "nothing is wrong with what it sends"
        await verifier.until(lambda node: node.last("progress").get("verdicts"))
        found = set(verifier.last("progress")["verdicts"])
        assert found == {"honest"}, notes_of(swarm.folder_of("verifier"))


@pytest.mark.timeout(400)
async def test_a_sampler_that_is_killed_and_started_again_goes_on_as_the_same_one(tmp_path):
    algorithm = {"batch_groups": 8}
    async with swarm_in(tmp_path, algorithm=algorithm, sampling={"group_size": 4}) as swarm:
        trainer = await swarm.start("trainer", *trainer_words())
        sampler = await swarm.start("llama", *LLAMA, "--slots", "8")
        await trainer.until(lambda node: len(node.all("step")) >= 3, within=200)
        await sampler.kill()
        before = len(trainer.all("step"))
        again = await swarm.start("llama", *LLAMA, "--slots", "8")
        await again.said("joined")
        assert again.peer_id == sampler.peer_id
        await trainer.until(lambda node: len(node.all("step")) >= before + 12, within=100)
        steps = trainer.all("step")
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        assert {name for step in steps for name in step["samplers"]} == {sampler.peer_id}
        await again.until(lambda node: node.last("progress").get("accepted", 0) > 0)
        assert set(again.last("progress")["refused"]) <= {"stale", "full"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["async", "sequential"])
async def test_a_swarm_of_processes_takes_the_model_from_a_third_to_above_four_fifths(mode, tmp_path):
    async with swarm_in(tmp_path, sync={"mode": mode}) as swarm:
        trainer, samplers, verifier = await start_all(swarm, 230)
        await trainer.until(lambda node: node.all("stopped"), within=1400)
        steps = trainer.all("step")
        assert 0.2 < mean_reward(steps[:5]) < 0.45
        assert mean_reward(steps[-10:]) > 0.8
        if mode == "sequential":
            check_sequential(steps)
        assert max(int(age) for step in steps for age in step["staleness"]) <= (4 if mode == "async" else 0)
        assert {name for step in steps for name in step["samplers"]} == {each.peer_id for each in samplers}
        assert set(verifier.last("progress").get("verdicts", {"honest": 0})) == {"honest"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_a_trainer_that_is_killed_again_and_again_goes_on_and_uses_nothing_twice(tmp_path):
    luck = random.Random(7)
    async with swarm_in(tmp_path, algorithm={"batch_groups": 8}, sampling={"group_size": 4}) as swarm:
        await swarm.start("llama", *LLAMA, "--slots", "8")
        for _ in range(4):
            trainer = await swarm.start("trainer", *trainer_words())
            goal = luck.randrange(1, 6)
            await trainer.until(lambda node, goal=goal: len(node.all("step")) >= goal, within=200)
            await trio.sleep(luck.uniform(0, 1))  # any moment will do, and none is better than another
            await trainer.kill()
        last = await swarm.start("trainer", *trainer_words())
        await last.until(lambda node: len(node.all("step")) >= 5, within=200)
        records = read_records(swarm.folder_of("trainer") / "records.sqlite")
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    used = [group.id for record in records for group in record.groups]
    assert len(used) == len(set(used)) == 8 * len(records)
    assert max(age for record in records for age in record.staleness) <= 4


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_samplers_come_and_go_and_progress_never_stops(tmp_path):
    """Keep one alive at a time: each is killed once the next has joined, and comes back later."""
    async with swarm_in(tmp_path, algorithm={"batch_groups": 8}, sampling={"group_size": 4}) as swarm:
        trainer = await swarm.start("trainer", *trainer_words())
        here = await swarm.start("sampler 0", *LLAMA, "--slots", "8")
        names = set()
        for turn in range(1, 7):
            coming = await swarm.start(f"sampler {turn % 3}", *(LLAMA, TORCH)[turn % 3 == 1], "--slots", "8")
            await coming.said("joined", within=200)
            await here.kill()
            names |= {here.peer_id, coming.peer_id}
            goal = len(trainer.all("step")) + 6
            await trainer.until(lambda node, goal=goal: len(node.all("step")) >= goal, within=200)
            here = coming
        steps = trainer.all("step")
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        assert len(names) == 3
        assert {name for step in steps for name in step["samplers"]} == names
        assert max(int(age) for step in steps for age in step["staleness"]) <= 4


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_trainer_of_two_processes_is_one_peer(tmp_path):
    async with swarm_in(tmp_path, algorithm={"batch_groups": 8}, sampling={"group_size": 4}) as swarm:
        trainer = await swarm.start("trainer", *trainer_words(steps=6), "--nproc", "2")
        sampler = await swarm.start("llama", *LLAMA, "--slots", "8")
        await trainer.until(lambda node: node.all("stopped"), within=600)
        assert [step["step"] for step in trainer.all("step")] == list(range(1, 7))
        assert {name for step in trainer.all("step") for name in step["samplers"]} == {sampler.peer_id}
        assert len(trainer.all("started")) == 1
