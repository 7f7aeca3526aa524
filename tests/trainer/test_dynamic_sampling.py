"""DAPO's dynamic sampling: groups without advantage are passed over, and credited."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import trio

from echo_node.control import formatting
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.node import Node
from echo_node.runs.algorithm import training_settings
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import read_records
from echo_node.trainer.batch_gatherer import BatchGatherer
from echo_node.trainer.batch_source import BatchRequest
from echo_node.trainer.journal import Batch, open_journal
from echo_node.trainer.journal_totals import NO_ADVANTAGE
from protocol import TrajectoryGroup, open_sealed
from protocol.manifest import Sync
from tests.crafting import SAMPLERS, TRAINER, Chain, changed_run, completion, open_run, sealed_group
from tests.records import record_of
from tests.trainer.test_crashes import swarm_of

RUN = open_run("async", staleness=2, group_size=4)
ANN, BOB = SAMPLERS[:2]
HEAD = Chain(RUN).next(ANN, BOB)


def with_params(run, **params):
    algorithm = dataclasses.replace(
        run.manifest.algorithm, params={**run.manifest.algorithm.params, **params}
    )
    return changed_run(run, algorithm=algorithm)


DAPO = with_params(RUN, loss="dapo", dynamic_sampling=3)
SEQUENTIAL = Sync(async_from=None, head_every=1, in_flight=False, staleness=0)


def group(slot, *rewards, lengths=(3, 3)):
    completions = [completion([1] * length) for length in lengths]
    sealed = sealed_group(RUN, HEAD.id, ANN, slot, completions)
    opened = open_sealed(sealed, TrajectoryGroup, RUN.id)
    return record_of(opened, 0, rewards=rewards)


class Drawn:
    """A source with these draws, and a scorer that leaves out what is named."""

    def __init__(self, *draws, bad=()):
        self.draws, self.bad, self.asked = list(draws), set(bad), []

    async def next_batch(self, request):
        await trio.lowlevel.checkpoint()
        self.asked.append(request.count)
        return tuple(self.draws.pop(0))

    async def score(self, groups):
        await trio.lowlevel.checkpoint()
        left_out = {each.id: "contract-failed" for each in groups if each.id in self.bad}
        return tuple(each for each in groups if each.id not in left_out), left_out


async def gather(drawn, draws=3, **params):
    run = with_params(RUN, dynamic_sampling=draws, batch_groups=2, **params)
    request = BatchRequest(1, 0, HEAD, None)
    return await BatchGatherer(drawn, drawn, training_settings(run.manifest)).gather(lambda: request)


EQUAL, OTHER, LAST = (group(slot, 1.0, 1.0) for slot in range(3))
GOOD, BETTER, BEST = (group(slot, 0.0, 1.0) for slot in range(3, 6))


async def test_for_groups_without_advantage_as_many_others_are_drawn():
    drawn = Drawn([EQUAL, GOOD], [OTHER], [BETTER])
    found = await gather(drawn)
    assert drawn.asked == [None, 1, 1]
    assert found.groups == (GOOD, BETTER)
    assert found.passed_over == (EQUAL, OTHER)
    assert found.passed_reward == 1.0


async def test_draws_are_bounded_and_what_has_an_advantage_by_then_is_the_batch():
    drawn = Drawn([EQUAL, OTHER], [LAST, GOOD], [BEST])
    found = await gather(drawn, draws=2)
    assert drawn.asked == [None, 2]
    assert (found.groups, found.passed_over) == ((GOOD,), (EQUAL, OTHER, LAST))


async def test_where_nothing_has_an_advantage_the_last_groups_are_the_batch():
    found = await gather(Drawn([EQUAL, OTHER], [LAST, group(9, 0.0, 0.0)]), draws=2)
    assert [each.slot for each in found.groups] == [2, 9]
    assert found.passed_over == (EQUAL, OTHER)


async def test_what_cannot_be_scored_is_replaced_and_not_credited():
    drawn = Drawn([GOOD, EQUAL], [BETTER], bad=[EQUAL.id])
    found = await gather(drawn)
    assert (found.groups, found.passed_over) == ((GOOD, BETTER), ())
    assert found.left_out == {EQUAL.id: "contract-failed"}


async def test_without_dynamic_sampling_a_batch_is_drawn_once_as_it_is():
    drawn = Drawn([EQUAL, GOOD])
    found = await gather(drawn, draws=0)
    assert (found.groups, found.passed_over, drawn.asked) == ((EQUAL, GOOD), (), [None])


async def test_a_penalty_for_length_is_an_advantage_too():
    ragged, even = group(7, 1.0, 1.0, lengths=(5, 6)), group(8, 1.0, 1.0, lengths=(6, 6))
    assert RUN.manifest.sampling.max_tokens >= 6
    found = await gather(Drawn([ragged, even], [GOOD]), overlong_buffer=RUN.manifest.sampling.max_tokens)
    assert (found.groups, found.passed_over) == ((ragged, GOOD), (even,))


async def test_the_journal_knows_what_was_passed_over_and_counts_it_as_learnt(tmp_path):
    batch = Batch(1, 0, 1, (GOOD,), HEAD.id, 1, 0.75)
    async with open_journal(tmp_path / "journal.sqlite", RUN.id) as journal:
        await journal.keep([OTHER])
        assert not await journal.draw(batch, {}, [EQUAL, OTHER])
    async with open_journal(tmp_path / "journal.sqlite", RUN.id) as journal:
        assert await journal.states() == {
            OTHER.id: NO_ADVANTAGE,
            EQUAL.id: NO_ADVANTAGE,
            GOOD.id: "drawn",
        }
        (found,) = await journal.batches()
        assert (found.passed_over, found.passed_reward) == (1, 0.75)
        assert set(await journal.passed_over([HEAD.id])) == {EQUAL.id, OTHER.id}
        assert await journal.passed_over([]) == []
        sums = await journal.sums(ANN.public)
        assert (sums.learnt, dict(sums.refused)) == (3, {})


def engine():
    return make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))


@pytest.mark.parametrize("mode", ["async", "sequential"])
async def test_a_swarm_learns_from_groups_with_an_advantage_alone_and_credits_the_others(tmp_path, mode):
    run = DAPO if mode == "async" else changed_run(DAPO, sync=SEQUENTIAL)

    async def work(swarm):
        for until in (2, 5):  # the second trainer goes on from the journal
            trainer = Node(run, TRAINER, swarm.join, folder=tmp_path)
            await trainer.train(until, records=Records(), first_samplers=2)

    spy = await swarm_of(run, [engine(), engine()], work)
    records = read_records(tmp_path / "records.sqlite")
    async with open_journal(tmp_path / "journal.sqlite", run.id) as journal:
        states, batches = await journal.states(), await journal.batches()
    passed_over = {each for each, state in states.items() if state == NO_ADVANTAGE}
    assert passed_over, "the embedded model has groups of equal rewards"
    assert passed_over <= spy.accepted
    assert not passed_over & spy.refused.keys()
    assert records[-1].dropped[NO_ADVANTAGE] > 0
    assert sum(batch.passed_over for batch in batches) == len(passed_over)
    for batch in batches:
        with_advantage = [len({*each.rewards}) > 1 for each in batch.groups]
        assert all(with_advantage) or not any(with_advantage)
    for record, batch in zip(records, batches, strict=False):
        rewards = [reward for each in batch.groups for reward in each.rewards]
        drawn = len(batch.groups) + batch.passed_over
        mean = (
            statistics.fmean(rewards) * len(batch.groups) + batch.passed_reward * batch.passed_over
        ) / drawn
        assert record.reward == pytest.approx(mean)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_dapo_with_dynamic_sampling_learns():
    numbers = {"batch_groups": 16, "learning_rate": 3e-4, "warm_up": 4}
    run = with_params(
        open_run("async", staleness=2, group_size=8), loss="dapo", dynamic_sampling=3, **numbers
    )
    records = Records()

    async def work(swarm):
        await Node(run, TRAINER, swarm.join).train(60, records=records, first_samplers=2)

    await swarm_of(run, [engine(), engine()], work)
    rewards = [record.reward for record in records.steps]
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.15
    assert records.steps[-1].dropped[NO_ADVANTAGE] > 0


def test_what_a_trainer_shows_says_how_many_groups_were_passed_over_and_why():
    shown = dict(formatting.rows({"progress": {"waiting": 1, "dropped": {NO_ADVANTAGE: 12, "stale": 2}}}))
    assert shown["groups"] == "1 wait, 14 dropped (12 no-advantage, 2 stale)"
