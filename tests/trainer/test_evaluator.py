"""Evaluation of versions during a run, on held-out prompts, and the best version that is kept."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import trio

from echo_node.engine.base import EngineStoppedError, TensorBytes
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import EngineError
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.evaluation_settings import EvaluationTable
from echo_node.runs.run import read_model
from echo_node.telemetry.evaluations import read_evaluations
from echo_node.telemetry.metrics import Records
from echo_node.trainer.evaluator import Evaluator
from echo_node.weights.publisher import WHOLE, Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import Roster
from protocol.manifest import Algorithm
from tests.crafting import SAMPLERS, TRAINER, changed_run, open_run

RUN = open_run("async", staleness=2, group_size=4)
MODEL = read_model(embedded.folder())
TABLE = EvaluationTable(every=2, prompts=8, temperature=0.5, max_tokens=6)


def engine():
    return make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 32, 1))


def spoilt(seed: int):
    """The embedded model with every weight well off."""
    luck = np.random.default_rng(seed)
    return {
        name: TensorBytes(
            each.dtype,
            each.shape,
            (
                np.frombuffer(each.data, np.uint16) ^ luck.integers(0, 256, len(each.data) // 2, np.uint16)
            ).tobytes(),
        )
        for name, each in MODEL.items()
    }


@pytest.fixture
def store():
    with WeightsStore.temporary(RUN.rules, layout_of(MODEL)) as opened:
        yield opened


def publish(store, states):
    """Publish versions, each with an anchor; prune as a trainer does."""
    publisher = Publisher(store, TRAINER, luck=lambda: bytes(32), cadence=WHOLE)
    for state in states:
        step = store.tip.message.version + 1 if store.tip else 0
        head = publisher.publish(state, step=step, roster=Roster(()), groups=()).head
        store.prune(versions=1, settled=head.id)
        yield head


class Held:
    """An engine whose completions wait until it is let go, or stopped."""

    def __init__(self, inner):
        self._inner = inner
        self.began, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def generate(self, requests, *, stop=lambda: False, **more):
        self.began.set()
        while not self.go.wait(0.005):
            if stop():
                raise EngineStoppedError("asked to stop")
        yield from self._inner.generate(requests, stop=stop, **more)


async def measured(evaluator, heads):
    """Let an evaluator measure each head in turn."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(evaluator.work)
        for head in heads:
            evaluator.offer(head)
            with trio.fail_after(60):
                await evaluator.finish()
        nursery.cancel_scope.cancel()


async def test_a_run_evaluates_every_few_steps_and_says_which_version_is_best(tmp_path):
    settings = {**RUN.manifest.algorithm.params, "evaluation": {"every": 3, "prompts": 8, "temperature": 0.5}}
    run = changed_run(RUN, algorithm=Algorithm(name="grpo", params=settings, version="1"))
    records, found = Records(tmp_path / "steps.jsonl"), {}
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        sampler = Node(run, SAMPLERS[0], swarm.join)
        nursery.start_soon(lambda: sampler.sample(slots_per_call=2, engine=engine()))
        trainer = Node(run, TRAINER, swarm.join, folder=tmp_path)
        with trio.fail_after(110):
            await trainer.train(6, records=records)
        found = trainer.status()["evaluation"]
        nursery.cancel_scope.cancel()
    steps = [each.step for each in records.evaluations]
    assert steps[0] == 0, "the first version is measured as well"
    assert steps[-1] == 6, "the last version is waited for"
    assert all(each.prompts == 8 and each.temperature == 0.5 for each in records.evaluations)
    assert read_evaluations(tmp_path) == records.evaluations
    assert (tmp_path / "steps.jsonl").read_text().count('"evaluation"') == len(steps)
    best = max(each.reward for each in records.evaluations)
    assert found["best_reward"] == round(best, 4)
    assert found["problem"] == ""


async def test_the_best_version_outlives_pruning_and_gives_way_to_a_better_one(store):
    evaluator = Evaluator(RUN, store, engine(), TABLE, Records())
    heads = []
    bad = [spoilt(seed) for seed in range(8)]
    for head in publish(store, [MODEL, *bad[:3], MODEL, *bad[3:]]):
        heads.append(head)
        await measured(evaluator, [head] if head.message.step in {1, 2, 4, 6} else [])
    assert evaluator.best.version == 4
    with store.materialise(heads[4].id) as kept:
        assert all(bytes(kept.state[name].data) == bytes(each.data) for name, each in MODEL.items())
    gone = [head.message.version for head in heads if not store.archive.can_build(head.id)]
    assert {1, 2, 5, 6} <= set(gone), "what was best before is let go, and so is what never was"


async def test_a_version_is_measured_although_many_came_after_it(store):
    slow, records = Held(engine()), Records()
    evaluator = Evaluator(RUN, store, slow, TABLE, records)
    chain = publish(store, [MODEL, *(spoilt(seed) for seed in range(1, 9))])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(evaluator.work)
        for head in chain:
            evaluator.offer(head)
            if head.message.step == 0:
                await trio.to_thread.run_sync(slow.began.wait)
        assert evaluator.status()["running"] == 0
        slow.go.set()
        with trio.fail_after(60):
            await evaluator.finish()
        nursery.cancel_scope.cancel()
    assert [each.version for each in records.evaluations] == [0, 8], "the newest takes the place of others"
    assert evaluator.status()["passed_over"] == 3


async def test_who_is_stopped_in_the_middle_measures_the_same_version_after_a_restart(store, tmp_path):
    heads = list(publish(store, [MODEL]))
    slow = Held(engine())
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        evaluator = Evaluator(RUN, store, slow, TABLE, Records(), folder=tmp_path)
        nursery.start_soon(evaluator.work)
        evaluator.resume()
        await trio.to_thread.run_sync(slow.began.wait)
        nursery.cancel_scope.cancel()
    assert time.monotonic() - began < 20
    assert read_evaluations(tmp_path) == []
    heads += publish(store, [spoilt(1)])
    records = Records()
    again = Evaluator(RUN, store, engine(), TABLE, records, folder=tmp_path)
    again.resume()
    await measured(again, [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again.work)
        with trio.fail_after(60):
            await again.finish()
        nursery.cancel_scope.cancel()
    assert len(records.evaluations) == 1
    assert records.evaluations[0].step // 2 == 0
    third = Evaluator(RUN, store, engine(), TABLE, records, folder=tmp_path)
    third.resume()
    assert third.best == records.evaluations[0]
    assert third.status()["running"] is None
    assert third._waiting is None, "what is measured is not measured again"


async def test_an_evaluation_that_takes_too_long_is_given_up_in_words(store):
    settings = TABLE.model_copy(update={"seconds": 1.0})
    evaluator = Evaluator(RUN, store, Held(engine()), settings, Records())
    await measured(evaluator, publish(store, [MODEL]))
    assert "given up after 1 s, at 0 of 8 prompts" in evaluator.status()["problem"]
    assert evaluator.best is None


async def test_an_engine_that_fails_ends_no_run(store):
    class Broken(Held):
        def generate(self, *_requests, **_more):
            raise EngineError("no memory")

    evaluator = Evaluator(RUN, store, Broken(engine()), TABLE, Records())
    await measured(evaluator, publish(store, [MODEL]))
    assert "could not be evaluated: no memory" in evaluator.status()["problem"]


async def test_a_line_that_a_crash_cut_off_is_left_out_and_the_next_one_is_whole(store, tmp_path):
    records = Records()
    evaluator = Evaluator(RUN, store, engine(), TABLE, records, folder=tmp_path)
    chain = publish(store, [MODEL, spoilt(1), spoilt(2)])
    await measured(evaluator, [next(chain)])
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"version": 1, "st')
    await measured(evaluator, list(chain)[1:])
    assert read_evaluations(tmp_path) == records.evaluations
    assert len(records.evaluations) == 2
    assert dataclasses.replace(records.evaluations[0], seconds=0.0).engine == "torch/f32"
